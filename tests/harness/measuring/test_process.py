"""Supervised children: deadlines, descendants and results."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from harness.measuring.process import LOG_LIMIT, RESULT_LIMIT, Ended, run_supervised
from tests.processes import HANG, is_alive, wait_for


def run(code: str, tmp_path: Path, *, timeout: float = HANG, **options: object) -> Ended:
    """Run Python code in which `fd` is the number of the result descriptor."""
    prologue = "import os, signal, subprocess, sys, time; fd = int(sys.stdin.read())\n"
    return run_supervised(
        [sys.executable, "-c", prologue + code],
        message=lambda fd: str(fd).encode(),
        env={"PATH": os.environ["PATH"]},
        cwd=tmp_path,
        timeout=timeout,
        **options,  # type: ignore[arg-type]
    )


def test_row_21_only_the_private_descriptor_carries_the_result(tmp_path: Path) -> None:
    ended = run("print('forged'); os.write(fd, b'true')", tmp_path)
    assert (ended.result, ended.returncode) == (b"true", 0)
    assert ended.log_tail == "forged\n"


def test_row_21_floods_are_bounded_and_never_block_the_child(tmp_path: Path) -> None:
    code = f"print('x' * (1 << 22) + 'end'); open(fd, 'wb').write(b'y' * {RESULT_LIMIT + 5})"
    ended = run(code, tmp_path)
    assert len(ended.log_tail) == LOG_LIMIT
    assert ended.log_tail.endswith("end\n")
    assert len(ended.result) == RESULT_LIMIT + 1
    assert ended.returncode == 0


def test_row_20_the_deadline_kills_the_whole_group_even_when_it_ignores_sigterm(tmp_path):
    pids = tmp_path / "pids"
    code = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(3600)
"""
    for seconds in (1.0, 10.0, 100.0, HANG):  # until parent and child start before the deadline
        ended = run(code, tmp_path, timeout=seconds)
        if pids.exists() and pids.read_text():
            break
    assert ended.timed_out
    assert ended.returncode == -signal.SIGKILL
    for pid in pids.read_text().split():
        wait_for(lambda pid=pid: not is_alive(int(pid)))  # type: ignore[misc]


def test_a_child_may_end_by_itself_at_sigterm(tmp_path: Path) -> None:
    class StopsWhenReady(threading.Event):
        def is_set(self) -> bool:
            return (tmp_path / "ready").exists()

    code = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
open("ready", "w").close()
while True:  # a signal just before a sleep does not end the sleep
    time.sleep(0.1)
"""
    ended = run(code, tmp_path, stop=StopsWhenReady())
    assert (ended.stopped, ended.timed_out, ended.returncode) == (True, False, 7)


def test_row_20_a_remaining_grandchild_is_killed(tmp_path: Path) -> None:
    code = """
pid = os.fork()
if pid == 0:
    time.sleep(3600)
os.write(fd, str(pid).encode())
"""
    ended = run(code, tmp_path)
    wait_for(lambda: not is_alive(int(ended.result)))


def test_row_20_a_grandchild_outside_the_group_does_not_delay_the_result(tmp_path: Path) -> None:
    # It keeps both pipes open.
    code = """
pid = os.fork()
if pid == 0:
    os.setsid()
    time.sleep(3600)
os.write(fd, str(pid).encode())
"""
    ended = run(code, tmp_path)
    os.kill(int(ended.result), signal.SIGKILL)
    assert not ended.timed_out


def test_a_child_may_end_without_reading_its_stdin(tmp_path: Path) -> None:
    ended = run_supervised(
        [sys.executable, "-c", "import os; os._exit(3)"],
        message=lambda fd: b"x" * 10_000,
        env={},
        cwd=tmp_path,
        timeout=HANG,
    )
    assert (ended.returncode, ended.result) == (3, b"")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    run("pass", tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run("print('x')", tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
