"""`pytest --quick` refuses what starts a process, and its list names files that are there."""

from __future__ import annotations

from pathlib import Path

from tests import PROJECT
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
    (tmp_path / "test_them.py").write_text(TESTS)
    options = ["-p", "tests.conftest", "-q", "-o", "addopts=--import-mode=importlib"]
    done = run_python("-m", "pytest", *options, "--quick", tmp_path / "test_them.py")
    assert "2 failed, 1 passed, 1 error" in done.stdout, done.stdout
    assert "take its file out of tests/quick.txt" in done.stdout


def test_the_list_of_quick_files_names_files() -> None:
    listed = (PROJECT / "tests/quick.txt").read_text().split()
    assert listed == sorted(set(listed))
    assert [name for name in listed if not (PROJECT / name).is_file()] == []
