"""One supervised child process: its deadline, its result, and its end with all descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.measuring.errors import USABLE_TMPDIR, MeasurementError
from harness.terminal import printable

RESULT_LIMIT = 1 << 20
"""Largest size of a result in bytes; one more byte is read to recognise a longer result."""

LOG_LIMIT = 16 << 10
"""Bytes of the end of stdout and stderr that are kept, for diagnosis only."""

TERM_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL."""

_POLL = 0.05
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def die_with_parent() -> None:
    """Let Linux kill this process when the thread that started it ends.

    The parent may already have ended: compare `os.getppid()` afterwards.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide(*, hidden: bool = True) -> None:
    """Deny the user's other processes access to this process's memory and /proc files.

    These files show its descriptors and its environment. A forked process inherits the setting, and
    sees its own descriptors only after `hide(hidden=False)`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(not hidden), 0, 0, 0)


def delete(path: Path) -> None:
    """Delete a path with rm(1), because deep folders exceed `shutil.rmtree`'s recursion limit."""
    subprocess.run(["rm", "-rf", "--", str(path)], stderr=subprocess.DEVNULL, check=False)


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder in `parent`, or TMPDIR, and delete it with its contents afterwards.

    Raises a MeasurementError if no folder of temporary files can be written.
    """
    try:
        parent = parent or Path(tempfile.gettempdir())
    except FileNotFoundError:
        reason = "no folder of temporary files can be written"
        raise MeasurementError(reason, "crash", remedy=USABLE_TMPDIR) from None
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        delete(folder)


@dataclass(frozen=True)
class Ended:
    """A child's end. `returncode` is negative for a signal, as in `subprocess`."""

    returncode: int
    result: bytes
    log_tail: str
    timed_out: bool = False
    stopped: bool = False
    exceeded: str = ""


class Confinement(Protocol):
    """Confines a child. `parent` is its parent's pid as the child sees it."""

    @property
    def parent(self) -> int: ...

    def command(
        self, argv: Sequence[str], env: Mapping[str, str], folder: Path, readable: Sequence[Path]
    ) -> list[str]:
        """Return a command that runs `argv` with only `readable`, `env` and an empty `folder`."""

    def exceeded(self, pid: int) -> str:
        """Return which limit the child `pid` and its descendants exceed; "" for none."""


class _Pipes:
    """The two streams of a child, read continuously so that it never blocks on a full pipe."""

    def __init__(self, result_fd: int, log_fd: int) -> None:
        self.result = bytearray()
        self.log = bytearray()
        self._selector = selectors.DefaultSelector()
        for fd, keep in ((result_fd, self._keep_result), (log_fd, self._keep_log)):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, keep)

    def _keep_result(self, data: bytes) -> None:
        self.result += data[: RESULT_LIMIT + 1 - len(self.result)]

    def _keep_log(self, data: bytes) -> None:
        self.log += data
        del self.log[:-LOG_LIMIT]

    def pump(self, timeout: float) -> bool:
        """Read the available data within `timeout` seconds; return whether there was any."""
        if not self._selector.get_map():
            time.sleep(timeout)
            return False
        events = self._selector.select(timeout)
        for key, _ in events:
            data = os.read(key.fd, 1 << 16)
            if data:
                key.data(data)
            else:
                self._selector.unregister(key.fd)
        return bool(events)

    def drain(self) -> None:
        """Read the rest. A descendant that left the group may still write: stop after 4 MiB."""
        for _ in range(64):
            if not (self._selector.get_map() and self.pump(0)):
                break

    def close(self) -> None:
        self._selector.close()


def _has_exited(pid: int) -> bool:
    # WNOWAIT leaves the zombie, so that its pid and its group cannot be reused before killpg.
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _signal_group(pid: int, number: signal.Signals) -> None:
    # The group may be empty; macOS returns EPERM if it holds only zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _end(pid: int, pipes: _Pipes) -> None:
    """End the child and every member of its group; the child stays a zombie for its parent."""
    if not _has_exited(pid):
        _signal_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + TERM_GRACE
        while not _has_exited(pid) and time.monotonic() < deadline:
            pipes.pump(_POLL)
    _signal_group(pid, signal.SIGKILL)


def _start(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path
) -> tuple[subprocess.Popen[bytes], int, int]:
    """Start the child in a new group; return it and both ends of its result pipe."""
    result_read, result_write = os.pipe()
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            pass_fds=(result_write,),
            start_new_session=True,
        )
    except BaseException:
        os.close(result_read)
        raise
    finally:
        os.close(result_write)
    return child, result_read, result_write


def run_supervised(
    argv: Sequence[str],
    *,
    message: Callable[[int], bytes],
    env: Mapping[str, str],
    cwd: Path,
    timeout: float,
    stop: threading.Event | None = None,
    exceeded: Callable[[int], str] = lambda _: "",
) -> Ended:
    """Run `argv` in its own process group and return how it ended.

    The calling thread must not end before this returns: a child that called `die_with_parent` is
    killed when the thread that started it ends. Raises an OSError if the child cannot be started.

    Args:
        message: returns the child's stdin; its argument is the number of the descriptor to which
            the child must write its result.
        timeout: seconds until the group gets SIGTERM and, after `TERM_GRACE`, SIGKILL.
        stop, exceeded: the group also ends once `stop` is set or `exceeded` returns a limit.
    """
    hide()  # otherwise code under test could open the result's pipe here
    child, result_read, result_write = _start(argv, env, cwd)
    stdin, stdout = child.stdin, child.stdout
    assert stdin is not None  # noqa: S101 # both are pipes
    assert stdout is not None  # noqa: S101
    started = time.monotonic()
    pipes = _Pipes(result_read, stdout.fileno())
    timed_out = stopped = False
    limit = ""
    try:
        with contextlib.suppress(BrokenPipeError):  # it ended immediately, with an exit code
            stdin.write(message(result_write))
            stdin.close()
        while not _has_exited(child.pid):
            pipes.pump(_POLL)
            timed_out = time.monotonic() - started > timeout
            stopped = stop is not None and stop.is_set()
            limit = exceeded(child.pid)
            if timed_out or stopped or limit:
                break
    finally:
        _end(child.pid, pipes)
        child.wait()
        pipes.drain()
        pipes.close()
        stdout.close()
        os.close(result_read)
    return Ended(
        returncode=child.returncode,
        result=bytes(pipes.result),
        log_tail=printable(pipes.log.decode(errors="replace"), allowed="\n"),
        timed_out=timed_out,
        stopped=stopped,
        exceeded=limit,
    )
