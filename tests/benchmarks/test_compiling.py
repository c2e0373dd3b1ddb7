"""Variants that are compiled side by side, by real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compiling
from benchmarks.compiling import Share

CALLEE = """\
import os, pathlib, sys, time
flag, folder, place, of = sys.argv[1:]
assert flag == "--compile" and of == "2"
pathlib.Path(folder, place).write_text(os.environ["FLA_CACHE_RESULTS"])
until = time.monotonic() + 600
while not pathlib.Path(folder, str(1 - int(place))).exists():  # until the other has started
    assert time.monotonic() < until
    time.sleep(0.01)
assert place == "0"
pathlib.Path(folder, "ended").touch()
"""


def test_shares_run_at_once_and_one_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "callee.py").write_text(CALLEE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 7})
    compiling.side_by_side("callee", tmp_path)
    found = {path.name: path.read_text() for path in tmp_path.iterdir() if not path.suffix}
    assert found == {"0": "0", "1": "0", "ended": ""}


def test_work_is_dealt_to_one_share_each() -> None:
    for number in range(10):
        assert sum(Share(place, 4).has(number) for place in range(4)) == 1
    assert Share.parse(["--compile", "a", "3", "16"]) == (3, 16)


def test_a_failure_is_said_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    compiling.attempt("host", lambda: 1 / 0)
    assert "host did not compile: ZeroDivisionError" in capsys.readouterr().err
