"""The journal in SQLite: live submissions, the latest closed ones, and the latest events.

The miner writes the intent before an act and the outcome after it. Each write is one transaction
with its event, and is on the disk (synchronous=FULL) before the call returns.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from neurons.miner.cycle import State, Submission
from neurons.miner.schema import CLOSED_STATES, copy_database, open_database
from neurons.runtime.errors import QuasarError
from neurons.runtime.sqlite_file import transaction
from neurons.wire.rules import ROUND_HOURS

EVENTS_KEPT = 5000
CLOSED_KEPT = 1000

_COLUMNS = tuple(field.name for field in fields(Submission))
# The SQL contains only constants of the code and field names of Submission, no outside input.
_INSERT = (
    f"INSERT INTO submissions ({', '.join(_COLUMNS[1:])}) "  # noqa: S608
    f"VALUES ({', '.join('?' * (len(_COLUMNS) - 1))})"
)
_UPDATE = (
    f"UPDATE submissions SET {', '.join(f'{name} = ?' for name in _COLUMNS[1:])} "  # noqa: S608
    "WHERE id = ? AND state = ?"
)


class StaleSubmission(QuasarError):
    """Another process has changed the submission's state since it was read: read it again."""


class Journal:
    """The submissions of one state folder, for one thread of the daemon that holds the lock.

    With `copy`, it works on a copy in memory, and the file, even of an older version, stays
    unchanged. Raises a ConfigError if the file is damaged, of a newer version, or cannot be opened.
    """

    def __init__(self, path: Path, *, copy: bool = False) -> None:
        self.path = path
        self._database = copy_database(path) if copy else open_database(path)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def insert(self, draft: Submission) -> Submission:
        """Insert a submission and return it with its `id`.

        Raises an IntegrityError if its hotkey already has a live submission for the target.
        """
        with transaction(self._database):
            cursor = self._database.execute(_INSERT, _values(draft))
            key = int(cursor.lastrowid or 0)
            self._add_event(key, draft.created_at, "moved", draft.state, None)
        return self.get(key)

    def judges_early(self, api_url: str, now: float) -> float | None:
        """Return the Unix time when this API last seemed to judge a commitment early, or None.

        Records older than a round do not count: the API's validators may change, and anybody can
        give a verdict on the public API. Records more than a round in the future do not count
        either, because a wrong clock wrote them.
        """
        query = "SELECT judges_early_at FROM apis WHERE url = ? AND abs(judges_early_at - ?) < ?"
        row = self._database.execute(query, (api_url, now, ROUND_HOURS * 3600.0)).fetchone()
        return None if row is None else float(row[0])

    def note_early_judgement(self, api_url: str, now: float) -> None:
        with transaction(self._database):
            self._database.execute("INSERT OR REPLACE INTO apis VALUES (?, ?)", (api_url, now))

    def move_api(self, old: str, new: str) -> None:
        """Replace an API's address in all records."""
        with transaction(self._database):
            for statement in (
                "UPDATE submissions SET api_url = ? WHERE api_url = ?",
                "UPDATE OR REPLACE strangers SET api_url = ? WHERE api_url = ?",
                "UPDATE OR REPLACE apis SET url = ? WHERE url = ?",
            ):
                self._database.execute(statement, (new, old))

    def note_foreign(
        self, hotkey: str, api_url: str, submission_ids: Iterable[int], now: float
    ) -> list[int]:
        """Record the hotkey's submissions that this journal did not send; return the new ones.

        While a lost reply leaves the number of an own submission unknown, the journal records
        nothing.
        """
        with transaction(self._database):
            numbered = "submission_id IS NOT NULL"
            awaited = f"round_id IS NOT NULL AND state NOT IN {CLOSED_STATES}"
            known = self._database.execute(
                "SELECT submission_id FROM submissions "  # noqa: S608
                f"WHERE hotkey = ? AND api_url = ? AND ({numbered} OR {awaited})",
                (hotkey, api_url),
            ).fetchall()
            numbers = {row["submission_id"] for row in known}
            if None in numbers:
                return []
            insert = "INSERT OR IGNORE INTO strangers VALUES (?, ?, ?, ?)"
            return [
                number
                for number in sorted(set(submission_ids) - numbers)
                if self._database.execute(insert, (api_url, hotkey, number, now)).rowcount
            ]

    def foreign(self, hotkey: str, api_url: str, since: float) -> list[int]:
        """Return the sorted numbers of the foreign submissions that were recorded since a time."""
        rows = self._database.execute(
            "SELECT submission_id FROM strangers WHERE hotkey = ? AND api_url = ? AND seen_at >= ? "
            "ORDER BY submission_id",
            (hotkey, api_url, since),
        )
        return [int(row[0]) for row in rows]

    def transition(
        self, before: Submission, after: Submission, *, kind: str = "moved"
    ) -> Submission:
        """Replace `before` by `after` and record it as an event, in one transaction.

        The event's kind is `moved` (the state changed), `acknowledged` (the operator decided) or
        `noted` (a fact was added).

        Raises StaleSubmission if the journal has it in another state than `before`, and an
        IntegrityError if the hotkey has another live submission for the target.
        """
        with transaction(self._database):
            cursor = self._database.execute(
                _UPDATE, (*_values(after), before.id, before.state.value)
            )
            if cursor.rowcount != 1:
                raise StaleSubmission(f"Submission {before.id} is no longer {before.state.value}.")
            self._add_event(after.id, after.updated_at, kind, after.state, after.reason)
            if after.closed:
                self._prune()
        return after

    def get(self, key: int) -> Submission:
        submission = self._find("id = ?", (key,))
        if submission is None:
            raise LookupError(f"The journal has no submission {key}.")
        return submission

    def live(self, hotkey: str, target_sequence_length: int | None = None) -> Submission | None:
        """Return the hotkey's live submission; without a target, the newest with `auto_target`."""
        return self._newest(f"state NOT IN {CLOSED_STATES}", hotkey, target_sequence_length)

    def live_submissions(self, hotkey: str | None = None) -> list[Submission]:
        """Return live submissions, newest first, of one hotkey or of all."""
        where = f"state NOT IN {CLOSED_STATES} AND (? IS NULL OR hotkey = ?)"
        return self._select(where, (hotkey, hotkey), 1000)

    def latest(self, limit: int = 1, *, hotkey: str | None = None) -> list[Submission]:
        """Return the `limit` newest submissions, newest first, of one hotkey or of all."""
        return self._select("(? IS NULL OR hotkey = ?)", (hotkey, hotkey), limit)

    def in_round(self, hotkey: str, round_id: int | None) -> list[Submission]:
        """Return the hotkey's submissions to a round of this number, newest first."""
        return self._select("hotkey = ? AND round_id IS ?", (hotkey, round_id), 1000)

    def last_closed(self, hotkey: str, target_sequence_length: int | None) -> Submission | None:
        """Return the newest closed submission; without a target, of those with `auto_target`."""
        return self._newest(f"state IN {CLOSED_STATES}", hotkey, target_sequence_length)

    def rejections(self, hotkey: str) -> int:
        """Count the REJECTED verdicts since the last VALIDATED one or acknowledgement."""
        row = self._database.execute(
            """SELECT count(*) FROM events JOIN submissions ON submissions.id = events.submission
                WHERE hotkey = :hotkey AND events.kind = 'moved' AND events.state = 'REJECTED'
                AND events.id > coalesce((SELECT max(events.id) FROM events
                    JOIN submissions ON submissions.id = events.submission WHERE hotkey = :hotkey
                    AND (events.state = 'VALIDATED' OR events.kind = 'acknowledged')), 0)""",
            {"hotkey": hotkey},
        ).fetchone()
        return int(row[0])

    def holds(self, submission: Submission) -> int:
        """Count how often it was HELD in its present state since `release` or another step."""
        row = self._database.execute(
            """SELECT count(*) FROM events WHERE submission = :id AND state = 'HELD'
                AND id > coalesce((SELECT max(id) FROM events WHERE submission = :id
                    AND (kind = 'acknowledged' OR state NOT IN ('FAILED', 'HELD', :state))), 0)""",
            {"id": submission.id, "state": submission.state.value},
        ).fetchone()
        return int(row[0])

    def _add_event(self, key: int, at: float, kind: str, state: State, note: str | None) -> None:
        self._database.execute(
            "INSERT INTO events (submission, at, kind, state, note) VALUES (?, ?, ?, ?, ?)",
            (key, at, kind, state.value, note),
        )

    def _prune(self) -> None:
        self._database.execute(
            "DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", (EVENTS_KEPT,)
        )
        self._database.execute(
            f"""DELETE FROM submissions WHERE state IN {CLOSED_STATES} AND id NOT IN (
                SELECT id FROM submissions WHERE state IN {CLOSED_STATES}
                ORDER BY id DESC LIMIT ?)""",  # noqa: S608
            (CLOSED_KEPT,),
        )

    def _newest(self, where: str, hotkey: str, target: int | None) -> Submission | None:
        where += " AND hotkey = ? AND "
        if target is None:
            return self._find(where + "auto_target = 1", (hotkey,))
        return self._find(where + "target_sequence_length = ?", (hotkey, target))

    def _find(self, where: str, values: tuple[Any, ...]) -> Submission | None:
        return next(iter(self._select(where, values, 1)), None)

    def _select(self, where: str, values: tuple[Any, ...], limit: int) -> list[Submission]:
        rows = self._database.execute(
            f"SELECT * FROM submissions WHERE {where} ORDER BY id DESC LIMIT ?",  # noqa: S608
            (*values, limit),
        )
        return [_submission(row) for row in rows]


def _values(submission: Submission) -> tuple[Any, ...]:
    values = []
    for name in _COLUMNS[1:]:
        value = getattr(submission, name)
        if isinstance(value, State):
            value = value.value
        values.append(json.dumps(value, allow_nan=False) if isinstance(value, dict) else value)
    return tuple(values)


def _submission(row: sqlite3.Row) -> Submission:
    values: dict[str, Any] = dict(row)
    values["state"] = State(values["state"])
    values["auto_target"] = bool(values["auto_target"])
    if values["resume_state"] is not None:
        values["resume_state"] = State(values["resume_state"])
    if values["benchmarks"] is not None:
        values["benchmarks"] = json.loads(values["benchmarks"])
    return Submission(**values)
