"""The sandbox: its probe for leaks, its limits and its system calls."""

import errno
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from neurons.runtime.errors import ConfigError
from neurons.validator import devices
from neurons.validator import sandbox as module
from neurons.validator.sandbox import Sandbox, open_sandbox
from neurons.validator.seccomp import ARCHITECTURES, this_architecture
from neurons.validator.usage import descendants, memory_of
from tests.processes import HANG

EVERY: frozenset[int] = frozenset()
"""Cores without a limit."""


class Open(Sandbox):
    """A sandbox without any confinement."""

    def command(
        self, argv: Sequence[str], env: Mapping[str, str], folder: Path, readable: Sequence[Path]
    ) -> list[str]:
        return list(argv)


def test_the_probe_finds_every_leak_without_a_sandbox() -> None:
    leaks = "; ".join(Open("", 2**40).leaks())
    for leak in ("net namespace", "pid namespace", "mnt namespace", "user's files", "network"):
        assert leak in leaks
    if os.access("/usr", os.W_OK):
        assert "write to the system" in leaks


def test_a_sandbox_that_does_not_start_is_reported_with_its_reason(monkeypatch):
    (reason,) = Sandbox("/bin/false", 2**40).leaks()
    assert "nothing can be started in it" in reason
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=r"bubblewrap is not installed.*apt-get.*SANDBOX=off"):
        open_sandbox()


def test_limits_cover_all_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, sys, time\n"
        "pid = os.fork()\n"
        "held = b'x' * 2**26\n"
        "sys.stdout.write('.'); sys.stdout.flush()\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.0)
    command = [sys.executable, "-S", "-c", f"import os\nos.setsid()\n{code}"]
    shell = [sys.executable, "-S", "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    parent = subprocess.Popen([*shell, *command], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        assert parent.stdout.read(2) == b".."
        assert Sandbox("", 2**40, cores=EVERY).exceeded(parent.pid) == ""
        assert "memory" in Sandbox("", 2**27, cores=EVERY).exceeded(parent.pid)
        monkeypatch.setattr(module, "PROCESSES", 1)
        assert "processes" in Sandbox("", 2**40, cores=EVERY).exceeded(parent.pid)
        monkeypatch.setattr(module, "PROCESSES", 256)
        monkeypatch.setattr(module, "MEMORY_LEFT", 2**60)
        half = 3 * 2**26  # each of the two processes holds 2**26 bytes
        assert "machine" in Sandbox("", half, cores=EVERY).exceeded(parent.pid)
        # another program took the memory
        assert Sandbox("", 2**40, cores=EVERY).exceeded(parent.pid) == ""
    finally:
        for pid in [*descendants(parent.pid, 9), parent.pid]:
            os.kill(pid, 9)
        parent.wait()


def test_a_process_whose_name_is_not_text_is_counted() -> None:
    code = (
        "import ctypes, sys\n"
        "ctypes.CDLL(None).prctl(15, b'\\xff')\n"  # PR_SET_NAME
        "held = b'x' * 2**26\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        memory = memory_of([child.pid], 9)
        child.communicate()
    assert memory > 2**26


@pytest.mark.parametrize(
    ("machine", "quota", "kept"),
    [
        (range(2), "max 100000", {0}),
        (range(4, 12), None, {4}),
        (range(32), None, {0, 1, 2, 3}),
        (range(64), "350000 100000", {0, *range(3, 64)}),
        (range(8), "50000 100000", set(range(8))),
        (range(1), None, {0}),
    ],
)
def test_some_cores_are_reserved(machine, quota, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(machine))
    monkeypatch.setattr(module, "QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert set(machine) - module.cores_for_forks() == kept


@pytest.mark.skipif(not module.cores_for_forks(), reason="this machine has one core")
def test_a_thread_on_a_reserved_core_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.0)
    code = (
        "import os, subprocess, sys, threading\n"
        "def widen():\n"
        "    sys.stdin.readline()\n"
        f"    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))})\n"
        "    print('wide', flush=True)\n"
        "    sys.stdin.readline()\n"
        "print('narrow', flush=True)\n"
        "threading.Thread(target=widen).start()\n"
    )
    sandbox = Sandbox("", 2**40)
    cores = ",".join(map(str, sorted(sandbox.cores)))
    command = ["taskset", "-c", cores, sys.executable, "-S", "-c", code]
    shell = [sys.executable, "-S", "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    with subprocess.Popen(
        [*shell, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "narrow\n"
        assert sandbox.exceeded(parent.pid) == ""
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "wide\n"
        assert sandbox.exceeded(parent.pid) == "it used cores that are reserved for others"
        parent.stdin.write("\n")


CALL = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
done = {}
for name, words in json.loads(sys.argv[1]).items():
    value = libc.syscall(*[ctypes.c_long(word) for word in words])
    done[name] = [value, ctypes.get_errno() if value < 0 else 0]
print(json.dumps(done))
"""

USUAL = """
import ctypes, mmap, os, resource, select, socket, subprocess, sys, threading
ran = []
thread = threading.Thread(target=ran.append, args=(1,)); thread.start(); thread.join()
pid = os.fork()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0 and ran == [1]
assert subprocess.run(["/bin/true"]).returncode == 0
mmap.mmap(-1, 4096).close()
os.close(os.memfd_create("m"))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.eventfd(0, 0) >= 0
select.epoll().close()
socket.socketpair()
socket.socket(socket.AF_INET6).close()
os.nice(0)
os.setpriority(os.PRIO_PROCESS, 0, 19)
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
assert resource.getrlimit(resource.RLIMIT_NOFILE)
print(sorted(os.sched_getaffinity(0)))
"""
"""Operations that torch, Triton and the CUDA driver need; it prints the usable cores."""


def call_inside(sandbox: Sandbox, folder: Path, **calls: list[int]) -> dict[str, list[int]]:
    """Run system calls in the sandbox; return the value and the error of each."""
    folder.mkdir(exist_ok=True)
    argv = [sys.executable, "-I", "-S", "-c", CALL, json.dumps(calls)]
    done = subprocess.run(
        sandbox.command(argv, {}, folder, []), capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_forbidden_system_calls_fail(sandbox: Sandbox, tmp_path: Path) -> None:
    known = this_architecture()
    assert known is not None
    errors = call_inside(
        sandbox,
        tmp_path,
        unshare=[known.calls["unshare"], 0x10000000],
        keyring=[known.calls["keyctl"], 0, -4, 1],
        key=[known.calls["add_key"], 0, 0, 0, 0, -4],
        ring=[known.calls["io_uring_setup"], 1, 0],
        bpf=[known.calls["bpf"], 0, 0, 0],
        perf=[known.calls["perf_event_open"], 0, 0, -1, -1, 0],
        clone=[known.calls["clone"], 0x10000000 | 17, 0, 0, 0, 0],
        clone3=[known.calls["clone3"], 0, 0],
        hypervisor=[known.calls["socket"], socket.AF_VSOCK, socket.SOCK_STREAM, 0],
        limits_of_others=[known.calls["prlimit64"], 1, resource.RLIMIT_NOFILE, 0, 0],
        priority_of_others=[known.calls["setpriority"], 0, 1, 19],
        priority_of_its_group=[known.calls["setpriority"], 1, 0, 19],
        scheduler_of_others=[known.calls["sched_setscheduler"], 1, 5, 0],
        parameters_of_others=[known.calls["sched_setparam"], 1, 0],
        attributes_of_others=[known.calls["sched_setattr"], 1, 0, 0],
        disk_priority_of_others=[known.calls["ioprio_set"], 1, 1, 3 << 13],
        disk_priority_of_its_group=[known.calls["ioprio_set"], 2, 0, 3 << 13],
        shared_segment=[known.calls["shmget"], 0, 4096, 0o600],
        cores=[known.calls["sched_setaffinity"], 0, 0, 0],
    )
    assert errors.pop("clone3") == [-1, errno.ENOSYS]
    assert errors.pop("hypervisor") == [-1, errno.EAFNOSUPPORT]
    assert errors == {name: [-1, errno.EPERM] for name in errors}


def test_a_measurement_has_its_system_calls_and_cores(sandbox: Sandbox, tmp_path: Path) -> None:
    argv = sandbox.command([sys.executable, "-I", "-S", "-c", USUAL], {}, tmp_path, [])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG)
    cores = sorted(sandbox.cores or os.sched_getaffinity(0))
    assert (done.stdout, done.stderr) == (f"{cores}\n", "")


def test_the_probe_finds_a_missing_filter(sandbox, monkeypatch):
    """Without the filter, an evaluation can leave a key for the next one."""
    monkeypatch.setattr(module, "_filtered", lambda argv, **_: list(argv))
    leaks = "; ".join(sandbox.leaks())
    if "keyrings" not in leaks:
        pytest.skip("NOT PROVEN ON THIS MACHINE: its kernel closes keyrings to everybody")
    assert "it may use kernel keyrings" in leaks


class Nvml:
    """A driver with four GPUs; the numbers of their device files are in reverse order."""

    NVMLError = OSError
    nvmlInit = nvmlShutdown = staticmethod(lambda: None)
    nvmlDeviceGetCount = staticmethod(lambda: 4)
    nvmlDeviceGetName = staticmethod(lambda handle: f"NVIDIA H{1 if handle == 3 else 2}00")
    nvmlDeviceGetUUID = staticmethod("GPU-{}".format)
    nvmlDeviceGetHandleByIndex = staticmethod(int)
    nvmlDeviceGetHandleByUUID = staticmethod(lambda name: 1 if name == "GPU-1" else "part of 2")
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle = staticmethod(lambda handle: int(handle[-1]))

    def nvmlDeviceGetMinorNumber(self, handle: int) -> int:
        if handle > 3:
            raise self.NVMLError
        return 3 - handle


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The device files of a machine with this driver."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "DEV", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "shown", "inside"),
    [
        (None, "nvidia3", "GPU-0"),
        ("2,3", "nvidia1", "GPU-2"),
        ("GPU-1", "nvidia2", "GPU-1"),
        ("MIG-2", "nvidia1", "MIG-2"),
    ],
)
def test_a_fork_sees_one_of_several_gpus(visible, shown, inside, driver):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    sandbox = Sandbox("", 2**40, devices.find_gpus(environ)[0], cores=EVERY)
    words = sandbox.command([], environ, driver, [])
    bound = [Path(words[n + 1]).name for n, word in enumerate(words) if word == "--dev-bind"]
    assert bound == [shown, "nvidiactl", "nvidia-uvm"]
    assert words[words.index("CUDA_VISIBLE_DEVICES") + 1] == inside
    on_cpu = sandbox.command([], {"CUDA_VISIBLE_DEVICES": ""}, driver, [])
    assert "--dev-bind" not in on_cpu
    read_only = [command.count("/proc") == 2 for command in (words, on_cpu)]
    assert read_only == [False, True]  # CUDA fails with a read-only /proc


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2, GPU-1", ["2", "GPU-1"]),
        ("1,GPU-1,0", ["1"]),
        ("1,0,7,2", ["1", "0"]),
        ("0,-1,1", ["0"]),
        ("0,MIG-2,1", ["0"]),
        ("MIG-2,MIG-2b,1", ["MIG-2"]),
    ],
)
def test_each_usable_gpu_is_listed_once(visible, names, driver):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.name for gpu in devices.find_gpus(environ)] == names


@pytest.mark.parametrize("visible", ["7", "", "no"])
def test_all_device_files_are_shown_for_an_unknown_gpu(visible: str, driver: Path) -> None:
    (gpu,) = devices.find_gpus({"CUDA_VISIBLE_DEVICES": visible})
    assert [file.name for file in gpu.files[:4]] == [f"nvidia{number}" for number in range(4)]
    assert gpu.visible == visible


@pytest.mark.parametrize(
    ("name", "header"),
    [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")],
)
def test_system_call_numbers_match_the_kernels_headers(name: str, header: str) -> None:
    file = Path("/usr/include") / header
    if not file.exists():
        pytest.skip(f"{file} is not installed")
    defined = dict(re.findall(r"#define __NR3?2?_?(\w+) (\d+)", file.read_text()))
    ours = ARCHITECTURES[name].calls
    theirs = {call: int(defined[call]) for call in ours if call in defined}
    assert theirs == {call: ours[call] for call in theirs}
    assert len(theirs) > 15
