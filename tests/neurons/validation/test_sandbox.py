"""The sandbox's own look at itself: what it finds where nothing is shut in, and where all is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from neurons.errors import ConfigError
from neurons.validation import sandbox as module
from neurons.validation.sandbox import Sandbox, machine_memory, open_sandbox


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
        assert Sandbox("", 2**40, gpu=False).exceeded(parent.pid) == ""
        assert "memory" in Sandbox("", 2**27, gpu=False).exceeded(parent.pid)
        monkeypatch.setattr(module, "PROCESSES", 1)
        assert "processes" in Sandbox("", 2**40, gpu=False).exceeded(parent.pid)
        monkeypatch.setattr(module, "PROCESSES", 256)
        monkeypatch.setattr(module, "MEMORY_LEFT", 2**60)
        assert "machine" in Sandbox("", 2**40, gpu=False).exceeded(parent.pid)
    finally:
        for pid in [*module._descendants(parent.pid), parent.pid]:
            os.kill(pid, 9)
        parent.wait()


def test_a_look_is_cheap() -> None:
    sandbox, begun = Sandbox("", 2**40, gpu=False), time.process_time()
    for _ in range(1000):
        sandbox.exceeded(os.getpid())
    assert time.process_time() - begun < 1.0
    assert machine_memory("MemTotal") > machine_memory("MemAvailable") > 0
