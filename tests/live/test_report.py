"""The report notices a duplicate, a loss, a false verdict and a stop that needs a person."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from neurons.miner import cycle as states
from neurons.miner.journal import Journal
from tests.live.report import (
    Cycle,
    Entry,
    Finding,
    Row,
    assign,
    judge,
    read_journal,
    read_rows,
    table,
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


def test_a_cycle_that_went_well_has_no_findings() -> None:
    assert _kinds([_entry("VALIDATED")], [_row()]) == []


def test_a_claim_that_was_submitted_twice_is_a_duplicate() -> None:
    assert _kinds([_entry("VALIDATED")], [_row(1), _row(2)]) == ["duplicate"]


def test_a_commitment_that_is_revealed_beside_its_direct_copy_is_a_duplicate() -> None:
    entries = [_entry("PREMATURE", commitment_hash=HASH), _entry("VALIDATED", id=2)]
    early = _row(1, commitment_hash=HASH, commit_hash=None, tokens_per_sec=0.0, is_revealed=False)
    assert _kinds(entries, [early, _row(2)]) == []
    revealed = _row(1, commitment_hash=HASH)
    assert "duplicate" in _kinds(entries, [revealed, _row(2)])


def test_two_commitments_that_live_are_a_duplicate() -> None:
    waiting = {"is_revealed": False, "validated": False, "tokens_per_sec": 0.0, "commit_hash": None}
    entries = [
        _entry("COMMITTED", commitment_hash=HASH),
        _entry("COMMITTED", id=2, commitment_hash="b"),
    ]
    rows = [_row(1, commitment_hash=HASH, **waiting), _row(2, commitment_hash="b", **waiting)]
    assert _kinds(entries, rows).count("duplicate") == 1


def test_the_same_claim_before_and_after_a_wipe_is_no_duplicate() -> None:
    rows = [_row(1, life=1, present=False, validated=False), _row(1, life=2)]
    assert _kinds([_entry("VALIDATED")], rows) == []


@pytest.mark.parametrize("state", ["ABANDONED", "UNRANKED"])
def test_a_row_that_waits_for_a_miner_that_gave_up_is_lost(state: str) -> None:
    entry = _entry(state, reason="Round 1 ended before a validator looked at it.")
    assert _kinds([entry], [_row(validated=False, score=None)]) == ["lost"]
    gone = _row(validated=False, score=None, present=False)
    assert _kinds([entry], [gone]) == []


def test_a_row_that_the_journal_does_not_know_is_lost() -> None:
    assert _kinds([_entry("VALIDATED")], [_row(), _row(2, tokens_per_sec=7.0)]) == ["lost"]


@pytest.mark.parametrize(
    ("state", "row"),
    [
        ("VALIDATED", None),
        ("VALIDATED", {"validated": False, "score": None}),
        ("VALIDATED", {"score": 0.0}),
        ("REJECTED", {}),
        ("RANKED", {"commitment_hash": HASH, "is_revealed": False}),
        ("RANKED", {"commitment_hash": HASH, "score": 0.0}),
        ("PREMATURE", {"commitment_hash": HASH}),
        ("UNRANKED", {"validated": False, "present": False}),
    ],
)
def test_a_verdict_that_no_validator_gave_is_false(state: str, row: dict | None) -> None:
    rows = [] if row is None else [_row(**row)]
    entry = _entry(state, commitment_hash=HASH if row and "commitment_hash" in row else None)
    assert "false verdict" in _kinds([entry], rows)


@pytest.mark.parametrize(
    ("state", "row"),
    [
        ("VALIDATED", {}),
        ("RANKED", {"score": 0.0}),
        ("REJECTED", {"score": 0.0}),
        ("PREMATURE", {"commitment_hash": HASH, "is_revealed": False, "score": 0.0}),
        ("PREMATURE", {"commitment_hash": HASH, "score": 0.0}),
        ("UNRANKED", {"score": 0.0}),
    ],
)
def test_a_verdict_that_the_server_bears_out_is_none(state: str, row: dict) -> None:
    entry = _entry(state, commitment_hash=row.get("commitment_hash"))
    assert _kinds([entry], [_row(**row)]) == []


def test_a_shown_score_that_is_not_the_servers_is_false() -> None:
    assert _kinds([_entry("VALIDATED", score=0.9)], [_row()]) == ["false verdict"]


def test_a_hold_counts_although_it_went_on_later() -> None:
    assert _kinds([_entry("VALIDATED", holds=("A redirect.",))], [_row()]) == ["needs a person"]
    assert _kinds([], [], status=78) == ["needs a person"]


def test_what_did_not_end_is_unfinished() -> None:
    assert _kinds([_entry("FAILED")], []) == ["unfinished"]
    assert _kinds([_entry("VALIDATED")], [_row()], status=None) == ["unfinished"]
    assert _kinds([], [], status=None) == ["unfinished"]


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


def test_the_table_shows_rows_requests_and_findings() -> None:
    sent = Counter({"POST /submit_kernel 200": 2})
    cycle = Cycle(3, "direct", 0.0, 2, 1, sent, entries=[_entry("VALIDATED")])
    text = table([cycle], [_row()], [Finding("duplicate", 3, "2 rows of one claim")])
    for words in (
        "cycle 3 (direct), exit status 1, started 2 times",
        "1 VALIDATED",
        "1/1 direct revealed=1 validated=1 score=0.500 claim=100.0",
        "POST /submit_kernel 200 x2",
        "cycle 3: 2 rows of one claim",
    ):
        assert words in text
