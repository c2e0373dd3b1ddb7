"""Calls that are compiled side by side, by real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compiling

CALLEE = """\
import os, pathlib, sys, time
flag, folder, name, other = sys.argv[1:]
assert flag == "--compile"
pathlib.Path(folder, name).write_text(os.environ["FLA_CACHE_RESULTS"])
until = time.monotonic() + 20
while not pathlib.Path(folder, other).exists():  # each waits for the other to have started
    assert time.monotonic() < until
    time.sleep(0.01)
assert name != "second"
pathlib.Path(folder, name + " ended").touch()
"""


def test_calls_run_at_once_and_one_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "callee.py").write_text(CALLEE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    compiling.side_by_side("callee", [(tmp_path, "first", "second"), (tmp_path, "second", "first")])
    found = {path.name: path.read_text() for path in tmp_path.iterdir() if not path.suffix}
    assert found.pop("first ended") == ""
    assert {name: text for name, text in found.items() if name in {"first", "second"}} == {
        "first": "0",
        "second": "0",
    }
    assert "second ended" not in found
