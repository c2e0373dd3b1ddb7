"""The GPU tests as data: real pytest processes on files that pass, fail, hang and die."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.cases import gpu_tests

MIXED = """\
import pytest
def test_right(): pass
def test_wrong(): assert 1 == 2, "by one"
def test_torn(missing): pass
@pytest.mark.skip(reason="needs two GPUs")
def test_two(): pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of tests/gpu."""
    monkeypatch.setattr(gpu_tests, "TESTS", tmp_path)
    return tmp_path


def test_every_test_is_counted_and_a_failure_is_named(folder, capsys):
    (folder / "cuda").mkdir()
    (folder / "cuda/test_mixed.py").write_text(MIXED)
    (folder / "test_dies.py").write_text("import os\ndef test_it(): os._exit(11)\n")
    first, run = gpu_tests.measure(Namespace(commit=None))
    later = run.entries[1].of["file"]
    assert (first.settings["left out"], run.settings["left out"]) == (later, "")
    mixed = next(one for one in run.entries if one.of["file"] == "cuda/test_mixed.py")
    assert mixed.figures == {"passed": 1, "failed": 2, "skipped": 1}
    assert mixed.failure == "test_wrong, test_torn"
    assert "test_dies.py: ended with status 11" in gpu_tests.misses(run)
    assert "by one" in capsys.readouterr().err


def test_a_file_that_hangs_is_cut_off_with_its_children(folder: Path) -> None:
    hang = "import subprocess\ndef test_it(): subprocess.run(['sleep', '60'])\n"
    (folder / "test_hangs.py").write_text(hang)
    entry = gpu_tests.run_file(folder / "test_hangs.py", limit=2)
    assert entry.failure == "was cut off after 2 s"
    assert entry.figures["failed"] == 1
