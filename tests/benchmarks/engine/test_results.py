"""The one format of measured data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine.results import DATA, ROOT, Entry, load, write
from tests.benchmarks.runs import run_of

ENTRIES = (
    Entry(table="calls", of={"tokens": 8}, by="a", figures={"ms": 2, "repeats": True}),
    Entry(table="calls", of={"tokens": 8}, by="b", figures={"ms": 3.0}, errors={"o": 1e-3}),
    Entry(table="calls", of={"tokens": 9}, by="b", failure="no memory"),
    Entry(table="curves", series={"losses": (2.0, 1.5)}, texts={"clock": "graph"}),
)


def test_a_written_run_is_read_unchanged(tmp_path: Path) -> None:
    run = run_of("made-up", *ENTRIES, settings={"rate": 2e-3, "n": 3, "gpu": "x"})
    write(tmp_path / "run.json", run)
    assert load(tmp_path / "run.json") == run
    lines = (tmp_path / "run.json").read_text().splitlines()
    assert sum('"table"' in line for line in lines) == len(ENTRIES)
    found = load(tmp_path / "run.json").entries[0].figures
    assert [type(found[name]) for name in ("ms", "repeats")] == [int, bool]


def test_rows_join_the_implementations_of_a_call() -> None:
    first, second = run_of("made-up", *ENTRIES).rows("calls")
    assert first.ratio("ms", "b", "a") == 1.5
    assert first.ratio("ms", "c", "a") is None
    assert first.figure("a", "absent") is None
    assert list(second.failures()) == [("b", "no memory")]


@pytest.mark.parametrize("path", [*sorted(DATA.glob("*.json")), ROOT / "benchmarks/honesty.json"])
def test_committed_data_has_the_format_and_names_its_commit(path: Path) -> None:
    run = load(path)
    assert run.commit
    assert run.entries
    assert (run.environment is None) == (run.case == "claim_simulation")
    assert json.loads(path.read_text())["schema_version"] == 2
