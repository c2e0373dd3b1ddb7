"""`pytest --quick` skips what starts a process, however it does so, and nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_python

TESTS = """
import multiprocessing, os, subprocess, threading, time
import pytest

def test_passes(): pass
def test_fails(): assert 0
def test_child(): subprocess.run(["true"])
def test_fork(): os.fork()
def test_worker(): multiprocessing.get_context("fork").Process(target=print).start()
def test_catches():
    try:
        subprocess.run(["true"])
    except BaseException:
        assert 0
def test_waits_for_a_thread_that_does():
    threading.Thread(target=subprocess.run, args=[["true"]]).start()
    threading.Event().wait()
@pytest.fixture
def child():
    return subprocess.run(["true"])
def test_fixture(child): pass
@pytest.fixture(scope="module")
def shared():
    try:
        return subprocess.run(["true"])
    finally:
        raise OSError("it could not be ended")
def test_first_of_two(shared): pass
def test_second_of_two(shared): pass
@pytest.mark.slow
def test_slow(): assert 0
def test_last(): pass
"""


def test_quick_skips_what_starts_a_process(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    options = ("--quick", "-p", "tests.conftest", "-W", "ignore", "-rA", "--tb=no")
    done = run_python("-m", "pytest", *options, tmp_path / "test_some.py")
    assert "1 failed, 2 passed, 8 skipped, 1 deselected" in done.stdout, done.stdout + done.stderr
    assert "FAILED" in done.stdout
    assert "test_some.py::test_fails" in done.stdout
