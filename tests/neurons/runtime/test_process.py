"""The lock, the signals and the waits, with real processes."""

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neurons.runtime.errors import ConfigError
from neurons.runtime.process import StateLock, wait_for_space, wait_unless
from tests.processes import HANG, started

HOLD = """
import sys, threading
from pathlib import Path
from neurons.runtime.process import StateLock
with StateLock(Path(sys.argv[1])):
    print("ready", flush=True)
    threading.Event().wait()
"""
WAIT = """
import sys, threading, time
from neurons.runtime.process import Stopped, stop_on_signals, wait_unless
stop = threading.Event()
with stop_on_signals(stop, grace=0.3 if sys.argv[1] == "slow" else 3600):
    print("ready", flush=True)
    try:
        wait_unless(stop, 3600)
    except Stopped:
        print("stopped", flush=True)
    if sys.argv[1] != "polite":
        while True:
            time.sleep(3600)
"""


@contextmanager
def child(code: str, argument: str) -> Iterator[subprocess.Popen[str]]:
    """Run `code`, and yield once it prints `ready`."""
    with started("-c", code, argument, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def test_row_14_a_second_instance_reports_the_pid_of_the_first(tmp_path: Path) -> None:
    with child(HOLD, str(tmp_path)) as first:
        with pytest.raises(ConfigError, match=f"pid {first.pid}.*STATE_DIR"):
            StateLock(tmp_path)
        first.kill()
        first.wait()
        with StateLock(tmp_path) as lock:  # kill -9 leaves no stale lock
            assert lock.path.read_text() == f"{os.getpid()}\n"


def test_a_child_that_outlives_the_miner_does_not_keep_the_lock(tmp_path: Path) -> None:
    with StateLock(tmp_path):
        sleeper = subprocess.Popen(["sleep", "3600"], close_fds=False)
    try:
        StateLock(tmp_path).release()
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EROFS, "ReadWritePaths"), (errno.EACCES, "chown")]
)
def test_a_state_folder_that_cannot_be_written_has_a_remedy(tmp_path, monkeypatch, number, remedy):
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(ConfigError, match=remedy):
        wait_for_space(tmp_path, lambda _: None)


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_row_15_a_signal_ends_a_wait_at_once(number: signal.Signals) -> None:
    with child(WAIT, "polite") as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=HANG)
        assert (output, process.returncode) == ("stopped\n", 0)


def test_row_15_under_nohup_sighup_does_not_stop_it() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a child inherits this
    try:
        with child(WAIT, "polite") as process:
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=HANG)
    finally:
        signal.signal(signal.SIGHUP, previous)
    # Otherwise SIGTERM would be the second signal, which exits with its number.
    assert (output, process.returncode) == ("stopped\n", 0)


def test_row_15_the_second_signal_exits_at_once() -> None:
    with child(WAIT, "stubborn") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=HANG) == 128 + signal.SIGTERM


def test_row_15_a_process_that_continues_is_ended_after_the_grace_period() -> None:
    with child(WAIT, "slow") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=HANG) == 0


def test_row_15_a_burst_of_signals_never_hangs() -> None:
    with child(WAIT, "polite") as process:
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=HANG) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)


def test_row_12_a_wait_does_not_follow_the_system_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)  # set back to 1970
    started = time.monotonic()
    wait_unless(threading.Event(), 0.05)
    assert time.monotonic() - started >= 0.04
