"""Turns and limits of processes, with real locks and real processes."""

from __future__ import annotations

import fcntl
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.worker.turn import Turn
from tests.processes import HANG, run_python, wait_for


def test_who_waits_for_a_turn_is_alone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "turn"
    turn = Turn(str(path))
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)  # both import
        fcntl.flock(other, fcntl.LOCK_UN)
        turn.wait()
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    Turn(None).wait()  # nobody to wait for


def test_seconds_count_from_the_start_of_the_process_without_its_waits(tmp_path: Path) -> None:
    path = tmp_path / "turn"
    path.touch()
    code = (
        "import sys, time; time.sleep(0.3)\n"
        "from harness.worker.turn import Turn\n"
        f"turn = Turn({str(path)!r}, {HANG}); print('shares', flush=True); turn.wait()\n"
        "print(turn.used)"
    )
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        began = time.monotonic()
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "shares\n"
        waits = re.compile(rf"-> FLOCK .* {child.pid} ")  # as proc_locks(5) writes it
        wait_for(lambda: waits.search(Path("/proc/locks").read_text()), child)
        time.sleep(1.0)
        fcntl.flock(other, fcntl.LOCK_UN)
        used = float(child.stdout.readline())
        took = time.monotonic() - began
        child.wait()
        child.stdout.close()
    assert 0.3 < used <= took - 0.9


def test_a_process_ends_itself_after_its_seconds(tmp_path: Path) -> None:
    code = "from harness.worker.turn import Turn; import time; Turn(None, 0.5); time.sleep(3600)"
    assert run_python("-c", code).returncode == -signal.SIGALRM
