"""The GPU tests as data: real pytest processes on files that pass, fail, hang and die."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from benchmarks.gpu_tests import run as runner
from benchmarks.gpu_tests.results import GpuTests, Outcome, failures, gpu_tests_table
from benchmarks.results import load
from tests.harness.samples import environment

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
    """An empty folder in place of tests/gpu, on a machine that tells of itself."""
    own = {"created": date(2026, 1, 2), "commit": "abc", "environment": environment()}
    monkeypatch.setattr(runner, "origin", lambda commit: own)
    monkeypatch.setattr(runner, "TESTS", tmp_path)
    return tmp_path


def test_every_test_is_counted_and_a_failure_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cuda").mkdir()
    (folder / "cuda/test_mixed.py").write_text(MIXED)
    (folder / "test_dies.py").write_text("import os\ndef test_it(): os._exit(11)\n")
    found = runner.run([], None)
    assert found.files["cuda/test_mixed.py"] == Outcome(
        passed=1, failed=2, skipped=1, failures=("test_wrong", "test_torn")
    )
    assert failures(found)[-1] == "test_dies.py: ended with status 11"
    assert "by one" in capsys.readouterr().err
    page = gpu_tests_table(found)
    assert "| cuda/test_mixed.py | 1 | 2 | 1 |" in page
    assert "| all of them | 1 | 3 | 1 |" in page
    assert (
        "Failed: cuda/test_mixed.py: test_wrong, cuda/test_mixed.py: test_torn, test_dies" in page
    )


def test_a_file_that_hangs_is_cut_off_with_its_children(folder: Path) -> None:
    hang = "import subprocess\ndef test_it(): subprocess.run(['sleep', '60'])\n"
    (folder / "test_hangs.py").write_text(hang)
    outcome = runner.run_file(folder / "test_hangs.py", limit=4)
    assert outcome == Outcome(failed=1, failures=("was cut off after 4 s",))


def test_the_file_is_written_and_the_status_tells(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "test_good.py").write_text("def test_it(): pass\n")
    (folder / "test_bad.py").write_text("def test_it(): raise ValueError\n")
    out = folder / "out.json"
    for only, status in (["test_good"], 0), (["test_bad"], 1):
        monkeypatch.setattr("sys.argv", ["run", "--out", str(out), "--only", *only])
        assert runner.main() == status
    found = load(GpuTests, out)
    assert (list(found.files), found.left_out) == (["test_bad.py"], ("test_good.py",))
    assert "Not part of this run: test_good.py." in gpu_tests_table(found)
