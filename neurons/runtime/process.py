"""The lock, the signals and the waits of a daemon."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from neurons.runtime.errors import ConfigError, QuasarError, not_writable
from neurons.runtime.observe import get_logger

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROGRESS = "measuring.json"
"""File in the state folder with the progress of the running measurement."""

GRACE_SECONDS = 8.0
"""Seconds for an orderly end after a stop; pm2 and systemd kill the process after 15."""

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a disk that may accept writes again later."""
START_BYTES = 2**18
"""Free space that a start requires: enough for the lock, the journal and the first log lines."""
SPACE_SECONDS = 60.0

log = get_logger("runtime")


class Stopped(QuasarError):
    """The user or the system has stopped the process; this is not an error."""


def wait_for_space(state_dir: Path, wait: Callable[[float], None]) -> None:
    """Return once the state folder's disk has space for a start; log each wait for space.

    The start waits instead of failing, because a process manager gives up on a program that ends
    repeatedly. Raises a ConfigError if the folder cannot be written for another reason. `wait` may
    raise Stopped.
    """
    probe = state_dir / f"space-{os.getpid()}"
    while True:
        try:
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                probe.write_bytes(bytes(START_BYTES))
            finally:
                probe.unlink(missing_ok=True)
            return
        except OSError as error:
            if error.errno not in DISK_FAULTS:
                raise not_writable(state_dir, error) from None
            log.error(
                "paused: no space left for the state folder",
                state=str(state_dir),
                reason=error.strerror,
                seconds=SPACE_SECONDS,
            )
            wait(SPACE_SECONDS)


class StateLock:
    """The right to use a state folder, held by one process; a ConfigError if another has it.

    It is Linux's flock on an open file. It ends with the process, even after kill -9, so it cannot
    become stale. The file stays and contains the last owner's pid.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "lock"
        try:
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Python's default O_CLOEXEC keeps the lock from child processes, which may live longer
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise not_writable(state_dir, error) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._descriptor, 20).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise ConfigError(
                f"Another process (pid {owner or 'unknown'}) uses the state folder {state_dir}. "
                "Stop it first, or give this one its own STATE_DIR."
            ) from None
        with suppress(OSError):  # the file of a process that was killed while it measured
            (state_dir / PROGRESS).unlink(missing_ok=True)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> StateLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(state_dir: Path) -> bool:
    """Return whether a process holds the folder's lock; this function never takes it."""
    try:
        inode = (state_dir / "lock").stat().st_ino
        rows = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any("FLOCK" in row and f":{inode} " in row for row in rows)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop this process; nohup makes it ignore SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]


@contextmanager
def stop_on_signals(
    stop: threading.Event, grace: float = GRACE_SECONDS, *, as_failure: bool = False
) -> Iterator[list[int]]:
    """Set `stop` on the first signal of `stop_signals`; exit at once on the second.

    Yields a list that receives the first signal's number. If the process still runs `grace` seconds
    after it, for example in a request without a reply, it exits with status 0, or with 128 plus the
    number if `as_failure`. The journal is consistent at any moment.

    The interpreter writes each signal's number into a pipe that a thread reads. A Python handler
    could not call `stop.set()` safely: it may interrupt `stop.wait()` while the main thread holds
    the event's lock.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    received: list[int] = []
    watched = reader, stop, grace, received, as_failure
    thread = threading.Thread(target=_watch, args=watched, name="signals", daemon=True)
    thread.start()
    previous_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A signal reaches the wake-up descriptor only if it has a handler, even one without effect.
    previous = {number: signal.signal(number, lambda *_: None) for number in stop_signals()}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_descriptor)
        os.close(writer)  # the thread reads the end of the pipe and returns
        thread.join()
        os.close(reader)


def _watch(
    reader: int, stop: threading.Event, grace: float, received: list[int], as_failure: bool
) -> None:
    timers = []
    while byte := os.read(reader, 1):
        number = byte[0]
        if number not in STOP_SIGNALS:
            continue
        if stop.is_set():
            os._exit(128 + number)
        received.append(number)
        stop.set()
        status = 128 + number if as_failure else 0
        timers.append(threading.Timer(grace, os._exit, (status,)))
        timers[-1].daemon = True
        timers[-1].start()
    for timer in timers:
        timer.cancel()


def wait_unless(stop: threading.Event, seconds: float) -> None:
    """Wait `seconds`; raise Stopped if `stop` is set before they have passed."""
    # Event.wait uses the monotonic clock, so a change of the system's clock has no effect.
    if stop.wait(max(seconds, 0.0)):
        raise Stopped("stop requested")
