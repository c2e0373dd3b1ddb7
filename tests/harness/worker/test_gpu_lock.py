"""GPU locks and time limits, with real files and processes."""

from __future__ import annotations

import fcntl
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import HANG, run_python, wait_for


def test_used_seconds_since_process_start_exclude_waits(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    code = (
        "import sys, time; time.sleep(0.3)\n"
        "from harness.worker.gpu_lock import GpuLock\n"
        f"lock = GpuLock({str(path)!r}, {HANG}); print('shares', flush=True); lock.take()\n"
        "print(lock.used)"
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
        elapsed = time.monotonic() - began
        child.wait()
        child.stdout.close()
    assert 0.3 < used <= elapsed - 0.9


def test_an_alarm_ends_a_process_at_its_limit(tmp_path: Path) -> None:
    code = (
        "import time; from harness.worker.gpu_lock import GpuLock; "
        "GpuLock(None, 0.5); time.sleep(3600)"
    )
    assert run_python("-c", code).returncode == -signal.SIGALRM
