"""The report finds duplicates, losses, false verdicts and stops that need the operator."""

from dataclasses import replace
from typing import Any

import pytest

from tests.live.report import Cycle, Entry, Row, judge

COMMIT, HASH = "c" * 40, "a" * 64


ROW = Row(1, True, 1, None, COMMIT, 100.0, is_revealed=True, validated=True, score=0.5)
ENTRY = Entry(1, "direct", "VALIDATED", "", COMMIT, 100.0, None, None, created_at=10.0)


def _row(number: int = 1, **changes: Any) -> Row:
    return replace(ROW, **{"id": number, **changes})


def _entry(state: str, **changes: Any) -> Entry:
    return replace(ENTRY, state=state, **changes)


def _kinds(entries: list[Entry], rows: list[Row], status: int | None = 0) -> list[str]:
    cycle = Cycle(1, "direct", 0.0, status=status, entries=entries)
    return [finding.kind for finding in judge([cycle], rows)]


OURS: dict[str, Any] = {"commitment_hash": HASH}
UNREVEALED: dict[str, Any] = {"is_revealed": False, "tokens_per_sec": 0.0, "commit_hash": None}
WAITING: dict[str, Any] = {"validated": False, "score": None}
GONE: dict[str, Any] = {"present": False, "life": 0}
ENDED: dict[str, Any] = {"reason": "Round 1 ended before a validator evaluated it."}


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
        ([_entry("VALIDATED", holds=("A redirect.",))], [_row()], ["needs the operator"]),
        ([_entry("FAILED")], [], ["unfinished"]),
    ],
)
def test_findings(entries, rows, kinds):
    assert _kinds(entries, rows) == kinds


@pytest.mark.parametrize(
    ("status", "kind"), [(78, "needs the operator"), (None, "unfinished"), (0, "unfinished")]
)
def test_a_cycle_without_a_submission_is_a_finding(status: int | None, kind: str) -> None:
    assert _kinds([], [], status) == [kind]


@pytest.mark.parametrize(
    ("state", "row", "false"),
    [
        ("VALIDATED", None, True),
        ("VALIDATED", {"score": 0.0}, True),
        ("VALIDATED", {}, False),
        ("REJECTED", {}, True),
        ("RANKED", {**OURS, "score": 0.0}, True),
        ("RANKED", {"score": 0.0}, False),
        ("PREMATURE", OURS, True),
        ("PREMATURE", {**OURS, "is_revealed": False, "score": 0.0}, False),
        ("PREMATURE", {**OURS, "score": 0.0}, False),
        ("UNRANKED", {"validated": False, "present": False}, True),
        ("UNRANKED", {"score": 0.0}, False),
    ],
)
def test_false_verdicts(state, row, false):
    rows = [] if row is None else [_row(**row)]
    entry = _entry(state, commitment_hash=(row or {}).get("commitment_hash"))
    assert ("false verdict" in _kinds([entry], rows)) is false
