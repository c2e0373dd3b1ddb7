"""The sandbox's own look at itself: what it finds where nothing is shut in, and where all is."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from neurons.errors import ConfigError
from neurons.validation import sandbox as module
from neurons.validation.sandbox import Sandbox, machine_memory, open_sandbox
from tests.processes import HANG

EVERY: frozenset[int] = frozenset()
"""Stands for no limit on cores."""


def needed_bubblewrap() -> tuple[str, int]:
    """Return the sandbox's program and room in memory; skip where this machine gives none."""
    try:
        sandbox = open_sandbox(gpu=False)
    except ConfigError as error:
        pytest.skip(f"NOT PROVEN ON THIS MACHINE: {error}")
    return sandbox.bubblewrap, sandbox.memory_bytes


class Open(Sandbox):
    """Shuts nothing in."""

    def command(
        self, argv: Sequence[str], env: Mapping[str, str], folder: Path, readable: Sequence[Path]
    ) -> list[str]:
        return list(argv)


def test_the_look_finds_every_leak_where_nothing_is_shut_in() -> None:
    found = "; ".join(Open("", 2**40, gpu=False).leaks())
    for leak in ("net namespace", "pid namespace", "mnt namespace", "user's files", "network"):
        assert leak in found
    if os.access("/usr", os.W_OK):
        assert "write to the system" in found


def test_a_sandbox_that_does_not_start_is_told_with_its_reason() -> None:
    (found,) = Sandbox("/bin/false", 2**40, gpu=False).leaks()
    assert "nothing can be started in it" in found


def test_without_bubblewrap_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=r"bubblewrap is not installed.*apt-get.*SANDBOX=off"):
        open_sandbox(gpu=False)


def test_memory_and_processes_of_all_descendants_count(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, sys, time\n"
        "pid = os.fork()\n"
        "held = b'x' * 2**26\n"
        "sys.stdout.write('.'); sys.stdout.flush()\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    command = [sys.executable, "-S", "-c", f"import os\nos.setsid()\n{code}"]
    shell = [sys.executable, "-S", "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    parent = subprocess.Popen([*shell, *command], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        assert parent.stdout.read(2) == b".."
        assert Sandbox("", 2**40, gpu=False, cores=EVERY).exceeded(parent.pid) == ""
        assert "memory" in Sandbox("", 2**27, gpu=False, cores=EVERY).exceeded(parent.pid)
        monkeypatch.setattr(module, "PROCESSES", 1)
        assert "processes" in Sandbox("", 2**40, gpu=False, cores=EVERY).exceeded(parent.pid)
        monkeypatch.setattr(module, "PROCESSES", 256)
        monkeypatch.setattr(module, "MEMORY_LEFT", 2**60)
        assert "machine" in Sandbox("", 2**40, gpu=False, cores=EVERY).exceeded(parent.pid)
    finally:
        for pid in [*module._descendants(parent.pid), parent.pid]:
            os.kill(pid, 9)
        parent.wait()


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
def test_some_cores_are_kept_from_forks(
    machine: range,
    quota: str | None,
    kept: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(machine))
    monkeypatch.setattr(module, "QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert set(machine) - module.cores_for_forks() == kept


BURN = """
import os, sys, time
end = time.monotonic() + 1.0
children = [os.fork() for _ in range(2)]  # four processes
while time.monotonic() < end:
    pass
for pid in children:
    if pid:
        os.waitpid(pid, 0)
"""


@pytest.mark.skipif(not module.cores_for_forks(), reason="this machine has one core")
def test_who_burns_every_core_gets_those_for_forks_alone(tmp_path: Path) -> None:
    sandbox = Sandbox(*needed_bubblewrap(), gpu=False)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.monotonic()
    argv = sandbox.command([sys.executable, "-I", "-S", "-c", BURN], {}, tmp_path, [])
    subprocess.run(argv, check=True, timeout=HANG)
    seconds = time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    burnt = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert burnt <= len(sandbox.cores) * seconds


@pytest.mark.skipif(not module.cores_for_forks(), reason="this machine has one core")
def test_a_thread_on_a_core_that_is_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
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
    sandbox = Sandbox("", 2**40, gpu=False)
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
        assert sandbox.exceeded(parent.pid) == "it took cores that are kept for others"
        parent.stdin.write("\n")


def test_a_look_is_cheap() -> None:
    sandbox, begun = Sandbox("", 2**40, gpu=False), time.process_time()
    for _ in range(1000):
        sandbox.exceeded(os.getpid())
    assert time.process_time() - begun < 1.0
    assert machine_memory("MemTotal") > machine_memory("MemAvailable") > 0
