"""`pytest --quick` fails tests that start a process."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_python

TESTS = """
import os, subprocess
import pytest

def test_passes(): pass
def test_child(): subprocess.run(["true"])
def test_fork(): os.fork()
@pytest.fixture
def child(): return subprocess.run(["true"])
def test_fixture(child): pass
"""


def test_a_quick_test_starts_no_process(tmp_path: Path) -> None:
    (tmp_path / "test_examples.py").write_text(TESTS)
    options = ["-p", "tests.conftest", "-q", "-o", "addopts=--import-mode=importlib"]
    done = run_python("-m", "pytest", *options, "--quick", tmp_path / "test_examples.py")
    assert "2 failed, 1 passed, 1 error" in done.stdout, done.stdout
    assert "remove its file from tests/quick.txt" in done.stdout
