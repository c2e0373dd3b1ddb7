"""Processes that end with their parent: restarted after a crash, or run once as a command.

`python -m neurons.runtime.child PARENT_PID MODULE [ARGUMENT...]` runs a module as such a process.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.measuring.process import die_with_parent, run_supervised
from harness.measuring.runner import child_environment
from neurons.runtime.loading import environment
from neurons.runtime.observe import get_logger

STOP_SECONDS = 5.0
RESTART_SECONDS = (1.0, 30.0)
LOG_BYTES = 5 * 2**20

log = get_logger("embedded")


@dataclass
class Child:
    """One supervised process; its `arguments` start with the name of a module."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    log_file: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    due: float = field(default_factory=time.monotonic)
    last_status: int | None = None

    def watch(self) -> None:
        """Start the process when it is due, schedule a restart if it has ended, bound its log."""
        if self.process is None:
            if time.monotonic() >= self.due:
                self._start()
            return
        status = self.process.poll()
        if status is not None:
            self.last_status = status
            first, longest = RESTART_SECONDS
            pause = min(longest, first * 2.0 ** min(self.starts - 1, 10))
            log.warning(
                "an embedded process died and is started again",
                process=self.name,
                status=status,
                seconds=pause,
                log=str(self.log_file),
            )
            self.stop()
            self.due = time.monotonic() + pause
        elif self.log_file.stat().st_size > LOG_BYTES:
            os.truncate(self.log_file, 0)  # it is written in append mode, so this is safe

    def _start(self) -> None:
        descriptor = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "neurons.runtime.child", str(os.getpid()), *self.arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        self.starts += 1

    def terminate(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Wait for its end, at most `STOP_SECONDS`, then kill the rest of its process group."""
        if self.process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):  # the group has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


def run_command(
    words: Sequence[str],
    *,
    variables: Mapping[str, str],
    cwd: Path,
    seconds: float,
    text: str = "",
    device: str = "cpu",
    stop: threading.Event | None = None,
) -> str:
    """Run a command that reads `text` from its stdin; return why it failed, or "".

    Its environment has `variables` and no secrets. Its process group is killed after `seconds` or
    when `stop` is set. Raises an OSError if it cannot be started.
    """
    ended = run_supervised(
        list(words),
        message=lambda _result_fd: text.encode(),
        env={**child_environment(environment(), device=device), **variables},
        cwd=cwd,
        timeout=seconds,
        stop=stop,
    )
    if ended.stopped:
        return "was stopped"
    if ended.timed_out:
        return f"was not done within {seconds:g} s"
    output = " ".join(ended.log_tail.split())[-300:] or "no output"
    return f"ended with status {ended.returncode}: {output}" if ended.returncode else ""


def _run_tied() -> None:
    """Run the module that the command line names; Linux kills this process when its parent ends."""
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):  # the parent ended before die_with_parent()
        sys.exit(1)
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_tied()
