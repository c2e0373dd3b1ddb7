"""The GPU lock of a process, and the seconds that the process has used, not counting waits."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path


class GpuLock:
    """The lock that allows one timed process at a time among those that share a file.

    Before `take`, the process shares the lock. `take` waits until the process holds the lock
    exclusively, which lasts until the process ends. Without a file nothing is locked.

    Args:
        path: the file; None for a process that is alone.
        seconds: SIGALRM ends the process after this time, waits excluded; None sets no limit.
    """

    def __init__(self, path: str | None, seconds: float | None = None) -> None:
        self._started, self._waited, self._seconds = _process_start(), 0.0, seconds
        self._lock = -1
        if path is not None:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._pass(fcntl.LOCK_SH)  # waits while another process is timed
        self._limit()

    def take(self) -> None:
        """Wait until this process alone has the lock."""
        if self._lock >= 0:
            self._pass(fcntl.LOCK_EX)
            self._limit()

    @property
    def used(self) -> float:
        """Seconds since the process started, without waits."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self._started - self._waited

    def _pass(self, lock: int) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        since = time.monotonic()
        fcntl.flock(self._lock, lock)
        self._waited += time.monotonic() - since

    def _limit(self) -> None:
        if self._seconds is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(self._seconds - self.used, 1e-3))


def _process_start() -> float:
    """Return when this process was started, in seconds since the machine's start."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
