"""The report notices a duplicate, a loss, a false verdict and a stop that needs a person."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from neurons.miner import cycle as states
from neurons.miner.journal import Journal
from tests.live.report import (
    Cycle,
    Entry,
    Row,
    assign,
    judge,
    read_journal,
    read_rows,
)

COMMIT, HASH = "c" * 40, "a" * 64


def _row(number: int = 1, **changes) -> Row:
    values = {
        "life": 1,
        "present": True,
        "id": number,
        "commitment_hash": None,
        "commit_hash": COMMIT,
        "tokens_per_sec": 100.0,
        "is_revealed": True,
        "validated": True,
        "score": 0.5,
    }
    return Row(**{**values, **changes})


def _entry(state: str, **changes) -> Entry:
    values = {
        "id": 1,
        "mode": "direct",
        "reason": "",
        "commit_hash": COMMIT,
        "tokens_per_sec": 100.0,
        "commitment_hash": None,
        "score": None,
        "created_at": 10.0,
    }
    return Entry(state=state, **{**values, **changes})


def _kinds(entries: list[Entry], rows: list[Row], status: int | None = 0) -> list[str]:
    cycle = Cycle(1, "direct", 0.0, status=status, entries=entries)
    return [finding.kind for finding in judge([cycle], rows)]


OURS: dict[str, Any] = {"commitment_hash": HASH}
UNREVEALED: dict[str, Any] = {"is_revealed": False, "tokens_per_sec": 0.0, "commit_hash": None}
WAITING: dict[str, Any] = {"validated": False, "score": None}
GONE: dict[str, Any] = {"present": False, "life": 0}
ENDED: dict[str, Any] = {"reason": "Round 1 ended before a validator looked at it."}


@pytest.mark.parametrize(
    ("entries", "rows", "kinds"),
    [
        ([_entry("VALIDATED")], [_row()], []),
        ([_entry("VALIDATED")], [_row(1), _row(2)], ["duplicate"]),
        ([_entry("VALIDATED")], [_row(1, **GONE, validated=False), _row(1)], []),  # a wipe between
        (
            [_entry("PREMATURE", **OURS), _entry("VALIDATED", id=2)],
            [_row(1, **OURS, **UNREVEALED), _row(2)],
            [],
        ),
        (
            [_entry("PREMATURE", **OURS), _entry("VALIDATED", id=2)],
            [_row(1, **OURS), _row(2)],
            ["duplicate", "false verdict"],
        ),
        (
            [_entry("COMMITTED", **OURS), _entry("COMMITTED", id=2, commitment_hash="b")],
            [
                _row(1, **OURS, **UNREVEALED, **WAITING),
                _row(2, commitment_hash="b", **UNREVEALED, **WAITING),
            ],
            ["duplicate", "unfinished", "unfinished"],
        ),
        ([_entry("ABANDONED", **ENDED)], [_row(**WAITING)], ["lost"]),
        ([_entry("UNRANKED", **ENDED)], [_row(**WAITING)], ["lost"]),
        ([_entry("ABANDONED", **ENDED)], [_row(**WAITING, **GONE)], []),
        ([_entry("VALIDATED")], [_row(), _row(2, tokens_per_sec=7.0)], ["lost"]),
        ([_entry("VALIDATED", score=0.9)], [_row()], ["false verdict"]),
        ([_entry("VALIDATED", holds=("A redirect.",))], [_row()], ["needs a person"]),
        ([_entry("FAILED")], [], ["unfinished"]),
    ],
)
def test_what_must_not_happen_is_found(
    entries: list[Entry], rows: list[Row], kinds: list[str]
) -> None:
    assert _kinds(entries, rows) == kinds


@pytest.mark.parametrize(
    ("status", "kind"), [(78, "needs a person"), (None, "unfinished"), (0, "unfinished")]
)
def test_a_cycle_without_a_submission_is_found(status: int | None, kind: str) -> None:
    assert _kinds([], [], status) == [kind]


@pytest.mark.parametrize(
    ("state", "row", "false"),
    [
        ("VALIDATED", None, True),
        ("VALIDATED", {"validated": False, "score": None}, True),
        ("VALIDATED", {"score": 0.0}, True),
        ("VALIDATED", {}, False),
        ("REJECTED", {}, True),
        ("REJECTED", {"score": 0.0}, False),
        ("RANKED", {**OURS, "is_revealed": False}, True),
        ("RANKED", {**OURS, "score": 0.0}, True),
        ("RANKED", {"score": 0.0}, False),
        ("PREMATURE", OURS, True),
        ("PREMATURE", {**OURS, "is_revealed": False, "score": 0.0}, False),
        ("PREMATURE", {**OURS, "score": 0.0}, False),
        ("UNRANKED", {"validated": False, "present": False}, True),
        ("UNRANKED", {"score": 0.0}, False),
    ],
)
def test_a_verdict_that_no_validator_gave_is_false(
    state: str, row: dict | None, false: bool
) -> None:
    rows = [] if row is None else [_row(**row)]
    entry = _entry(state, commitment_hash=(row or {}).get("commitment_hash"))
    assert ("false verdict" in _kinds([entry], rows)) is false


def test_reads_the_public_table_of_every_life(tmp_path: Path) -> None:
    for life, (hotkey, validated) in enumerate([("me", 1), ("me", 0), ("other", 0)], 1):
        with closing(sqlite3.connect(tmp_path / f"{life}.db")) as database, database:
            database.execute(
                "CREATE TABLE speed_submissions (id INTEGER, miner_hotkey TEXT, commitment_hash "
                "TEXT, commit_hash TEXT, tokens_per_sec FLOAT, is_revealed BOOLEAN, validated "
                "BOOLEAN, score FLOAT, commitment_salt TEXT)"
            )
            values = (7, hotkey, None, COMMIT, 100.0, 1, validated, None, "salt")
            database.execute(
                "INSERT INTO speed_submissions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values
            )
    rows = read_rows([tmp_path / f"{life}.db" for life in (1, 2, 3)], "me")
    assert [(row.life, row.present, row.id, row.validated) for row in rows] == [
        (1, False, 7, True),
        (2, False, 7, False),
    ]


def test_reads_the_miners_own_journal_and_never_its_salt(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        made = journal.insert(states.Submission(0, "me", 512, "direct", "", "", created_at=20.0))
        held = states.hold(made, "No key.", "Bring one.", 21.0)
        journal.transition(made, held)
        entries = read_journal(path, "me")
    assert [(entry.state, entry.reason, entry.holds) for entry in entries] == [
        ("HELD", "No key.", ("No key.",))
    ]
    cycles = [Cycle(1, "direct", 0.0), Cycle(2, "direct", 20.0), Cycle(3, "direct", 30.0)]
    assign(entries, cycles)
    assert [len(cycle.entries) for cycle in cycles] == [0, 1, 0]
    assert "salt" not in vars(entries[0])
