"""The sandbox of a fork's code.

bubblewrap runs a fork's code in separate namespaces: as another user, without network and other
processes. The code sees a read-only system without this user's files, an empty folder in memory,
and the devices of one GPU. A seccomp filter closes parts of Linux that no measurement needs. Some
cores are reserved for the validator. When the sandbox's first process ends, Linux kills all others.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from neurons.runtime.errors import ConfigError, Problem
from neurons.validator.devices import Gpu
from neurons.validator.leaks import find_leaks
from neurons.validator.packages import Packages, find_packages, hidden_entries
from neurons.validator.seccomp import INSTALL, assemble, this_architecture
from neurons.validator.usage import affinities, descendants, machine_memory, memory_of

USER = 60_999
"""The user id of a fork's code, which has no account on usual systems. Unless this process is root,
it exists only in the sandbox's user namespace."""

FOLDER_BYTES = 4 * 2**30
TEMPORARY_BYTES = 2**28
FILE_BYTES = 2 * 2**30
TASKS, PROCESSES, OPEN_FILES = 4096, 256, 4096
DESCRIPTORS = 16 * OPEN_FILES
"""Maximum number of open files that are searched for memory files and sockets."""
MEMORY_SHARE = 0.75
MEMORY_LEFT = 2**28
"""Minimum of the machine's free bytes while a fork uses more than half of its memory limit."""
CORES_PER_RESERVED = 8
"""One core in this many is reserved for other work, at least one; forks use the rest."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
CHECK_SECONDS = 0.2

_SYSTEM = ("/usr", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives", "/etc/localtime")
_LINKED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


@dataclass
class Sandbox:
    """A `harness.measuring.process.Confinement` by bubblewrap."""

    bubblewrap: str
    memory_bytes: int  # limit for all processes of one child together, including shared memory
    # the GPU that a child with access to GPUs sees; None for none
    gpu: Gpu | None = None
    parent: int = 1  # the pid of the child's parent, inside the sandbox
    # the cores of a child, which is killed if a thread uses others; empty for all
    cores: frozenset[int] = field(default_factory=lambda: cores_for_forks())
    # the folders from which workers import packages, visible read-only
    packages: Packages = field(default_factory=find_packages)
    _checked: dict[int, float] = field(default_factory=dict)

    def command(
        self, argv: Sequence[str], env: Mapping[str, str], folder: Path, readable: Sequence[Path]
    ) -> list[str]:
        """Return the command that runs `argv` in an empty `folder`, with `readable` read-only.

        The caller runs the command with the environment `env`. Inside the sandbox, `folder` is in
        memory and vanishes with the process. The folder of this path outside is not changed.
        """
        # when the machine's memory runs out, Linux kills the fork first
        words = ["choom", "-n", "1000", "--"]
        words += ["taskset", "-c", ",".join(map(str, sorted(self.cores)))] if self.cores else []
        words += [self.bubblewrap, "--die-with-parent", "--new-session", "--unshare-ipc"]
        words += ["--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        words += ["--hostname", "sandbox", *self._as_user(), *self._files(env, readable)]
        words += ["--perms", "1777", "--size", str(FOLDER_BYTES), "--tmpfs", str(folder)]
        # With a writable /proc, a fork could undo choom's setting unless root made it, but with a
        # read-only one CUDA cannot be initialised.
        words += [] if self._shown_gpu(env) else ["--remount-ro", "/proc"]
        words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(folder)]
        for name in ("HOME", "TMPDIR"):
            words += ["--setenv", name, str(folder)]
        for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME"):
            words += ["--setenv", name, str(folder / "cache" / name.lower())]
        words += ["--setenv", "USER", "sandbox", "--setenv", "LOGNAME", "sandbox"]
        if self.packages.user_base:  # otherwise Python looks for the user site in the new HOME
            words += ["--setenv", "PYTHONUSERBASE", self.packages.user_base]
        return [*words, "--", *self._limits(), *_filtered(argv, pinned=not self.gpu)]

    def exceeded(self, pid: int) -> str:
        """Return which limit the descendants of `pid` exceed; "" for none."""
        now = time.monotonic()
        if now - self._checked.get(pid, 0.0) < CHECK_SECONDS:
            return ""
        self._checked = {pid: now}
        processes = list(descendants(pid, 2 * PROCESSES))
        if len(processes) > PROCESSES:
            return f"it started more than {PROCESSES} processes"
        if self.cores and any(not cores <= self.cores for cores in affinities(processes)):
            return "it used cores that are reserved for others"
        memory = memory_of(processes, DESCRIPTORS)
        if memory > self.memory_bytes:
            return f"it used more than {self.memory_bytes / 2**30:.1f} GiB of memory"
        # below half of its limit, the fork is not the cause; Linux kills it only as a last resort
        if memory > self.memory_bytes / 2 and machine_memory("MemAvailable") < MEMORY_LEFT:
            return "it left this machine without memory"
        return ""

    def leaks(self) -> list[str]:
        """Return what a process inside can do although the sandbox should prevent it."""
        return find_leaks(lambda argv, folder: self.command(argv, {}, folder, []))

    def _as_user(self) -> list[str]:
        if os.geteuid() == 0:
            # setpriv changes the user, because root is exempt from the limit of processes
            capabilities = ["--cap-drop", "ALL"]
            return [*capabilities, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        names = ["--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
        return [*names, "--uid", str(USER), "--gid", str(USER)]

    def _limits(self) -> list[str]:
        limits = ["prlimit", f"--nproc={TASKS}", f"--fsize={FILE_BYTES}", "--core=0"]
        limits += [f"--nofile={OPEN_FILES}", "--"]
        if os.geteuid() != 0:
            return limits
        user = [f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all"]
        return [*limits, "setpriv", *user, "--"]

    def _shown_gpu(self, env: Mapping[str, str]) -> Gpu | None:
        return None if env.get("CUDA_VISIBLE_DEVICES") == "" else self.gpu  # "": a CPU process

    def _files(self, env: Mapping[str, str], readable: Sequence[Path]) -> Iterator[str]:
        shown = [*_SYSTEM, "/sys" if self.gpu else "/sys/devices/system"]
        for path in _LINKED:
            if os.path.islink(path):
                yield from ("--symlink", os.readlink(path), path)
            else:
                shown.append(path)
        yield from ("--proc", "/proc", "--dev", "/dev")
        for path in ("/tmp", "/dev/shm"):  # noqa: S108 # they are the sandbox's own
            yield from ("--perms", "1777", "--size", str(TEMPORARY_BYTES), "--tmpfs", path)
        gpu = self._shown_gpu(env)
        if gpu is not None:
            for device in gpu.files:
                yield from ("--dev-bind", str(device), str(device))
            yield from ("--setenv", "CUDA_VISIBLE_DEVICES", gpu.visible)
        libraries = filter(os.path.isabs, env.get("LD_LIBRARY_PATH", "").split(":"))
        shown += [*libraries, *self.packages.shown, *map(str, readable)]
        masked: list[str] = []  # packages may be below a masked folder, for example in a `.venv`
        for path in sorted(dict.fromkeys(shown), key=lambda path: path.count("/")):
            if os.path.exists(path) and not path.startswith("/usr/"):
                yield from _show(path)
                for hidden in hidden_entries(path) if path in self.packages.shown else ():
                    yield from _mask(hidden)
                    masked.append(hidden)
        for hidden in filter(os.path.isdir, masked):
            yield from ("--remount-ro", hidden)


def _filtered(argv: Sequence[str], *, pinned: bool) -> list[str]:
    architecture = this_architecture()
    if architecture is None:
        return list(argv)
    program = assemble(architecture, pinned=pinned).hex()
    install = [sys.executable, "-I", "-S", "-c", INSTALL, program]
    return [*install, *argv]


def _show(path: str) -> Iterator[str]:
    for parent in reversed(Path(path).parents):  # otherwise only root could enter them
        yield from ("--perms", "0755", "--dir", str(parent))
    yield from ("--ro-bind", path, path)


def _mask(path: str) -> Iterator[str]:
    """Mask a hidden folder or file by an empty one."""
    if os.path.isdir(path):
        yield from ("--perms", "0755", "--tmpfs", path)
    else:
        yield from ("--ro-bind", "/dev/null", path)


def cores_for_forks() -> frozenset[int]:
    """Return the cores for forks, within the cgroup's quota; empty if there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such limit
        quota, period = map(int, QUOTA.read_text().split())
        cores = cores[: max(1, quota // period)]
    return frozenset(cores[max(1, len(cores) // CORES_PER_RESERVED) :])


def open_sandbox(gpu: Gpu | None = None, private: Iterable[Path] = ()) -> Sandbox:
    """Return a sandbox after a test of its isolation on this machine.

    It does not show folders of packages that contain one of the `private` paths. Raises a
    ConfigError with the reasons if no sandbox works.
    """
    bubblewrap = shutil.which("bwrap")
    memory = int(MEMORY_SHARE * machine_memory("MemTotal"))
    if bubblewrap is None:
        leaks = ["bubblewrap is not installed"]
    else:
        sandbox = Sandbox(bubblewrap, memory, gpu, packages=find_packages(private))
        leaks = sandbox.leaks()
        if not leaks:
            return sandbox
    raise ConfigError(
        Problem(
            f"No sandbox for forks works on this machine: {'; '.join(leaks)}.",
            "Install bubblewrap 0.8 or newer (apt-get install bubblewrap) and let this user make "
            "namespaces, which containers often forbid. SANDBOX=off runs forks with this "
            "user's rights: only for forks that you trust.",
        )
    )
