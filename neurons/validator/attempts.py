"""The validator's attempts, recorded before each evaluation so that they survive a crash."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import time

from neurons.runtime.sqlite_file import SqliteFile
from neurons.validator.verdict import Verdict
from neurons.wire.protocol import QueuedSubmission
from neurons.wire.rules import ROUND_HOURS

MAX_CRASHES = 3
"""Crashes of the validator during evaluations of one submission, after which it is skipped."""

FIRST_PAUSE, MAX_PAUSE = 60.0, 3600.0
"""Seconds until the validator repeats an evaluation after a fault of this machine or the network.
The pause doubles with each fault."""

BEGUN_SECONDS = 600.0
"""Seconds that count for an evaluation that runs, or that a crash has ended. Otherwise one client's
new hotkeys would get several GPUs at once."""

SPENT_SECONDS = ROUND_HOURS * 3600.0
"""Seconds after which the time spent on a hotkey no longer counts."""

_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS attempts (
    submission TEXT PRIMARY KEY,
    running INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0,
    faults INTEGER NOT NULL DEFAULT 0,
    due REAL NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '',
    score REAL,
    actual REAL,
    measured TEXT,
    device TEXT
) STRICT
""",
    "CREATE TABLE IF NOT EXISTS spent (hotkey TEXT, ended REAL, seconds REAL) STRICT",
    "CREATE INDEX IF NOT EXISTS spent_of ON spent (hotkey, seconds)",
)
_ADDED = ("measured", "device")
"""Columns that earlier versions did not create."""


def age(submission: QueuedSubmission) -> tuple[str, int]:
    """Return the sort key by age, oldest first."""
    return submission.created_at, submission.id


def _payers(submission: QueuedSubmission) -> tuple[str, str]:
    """Return the keys, of the client and of the hotkey, under which evaluation time counts.

    The client is the one that the API bans, or the hotkey if the API does not show clients.
    """
    return f"client {submission.ip_address or submission.miner_hotkey}", submission.miner_hotkey


FILE = SqliteFile(
    "validator's list of attempts",
    "Move it away: the validator then repeats evaluations if the API does not have their verdicts.",
)


def _prepare(database: sqlite3.Connection) -> None:
    for statement in _SCHEMA:
        database.execute(statement)
    columns = {row[1] for row in database.execute("PRAGMA table_info(attempts)")}
    for name in _ADDED:
        if name not in columns:
            database.execute(f"ALTER TABLE attempts ADD COLUMN {name} TEXT")
    # If an attempt is still marked as running, the validator crashed during it.
    database.execute("UPDATE attempts SET running = 0, deaths = deaths + 1 WHERE running")


@dataclass(frozen=True)
class Attempt:
    """The attempts at one submission."""

    deaths: int = 0  # evaluations during which the validator crashed
    faults: int = 0  # evaluations that a fault of this machine or the network ended
    due: float = 0.0  # Unix seconds of the next attempt
    reason: str = ""
    verdict: Verdict | None = None  # not yet written to the API

    @property
    def skipped(self) -> bool:
        """Whether the validator repeats it only with `--again`."""
        return self.verdict is None and self.deaths >= MAX_CRASHES


class Attempts:
    """A validator's attempts at the submissions of the API at `api_url`, in an SQLite file.

    Raises the errors of `SqliteFile.open`.
    """

    def __init__(self, file: Path, api_url: str, clock: Callable[[], float] = time) -> None:
        self._api_url, self._clock = api_url, clock
        self._database = FILE.open(file, _prepare)

    def close(self) -> None:
        self._database.close()

    def of(self, submission: QueuedSubmission) -> Attempt:
        columns = "deaths, faults, due, reason, score, actual, measured, device"
        query = f"SELECT {columns} FROM attempts WHERE submission = ?"  # noqa: S608 # constants
        row = self._database.execute(query, [self._name(submission)]).fetchone()
        if row is None:
            return Attempt()
        deaths, faults, due, reason, score, actual, measured, device = row
        verdict = None
        if score is not None:
            verdict = Verdict(score, reason, actual, json.loads(measured or "{}"), device)
        return Attempt(deaths, faults, due, reason, verdict)

    def begin(self, submission: QueuedSubmission) -> None:
        self._write(submission, running=1)
        self.record_time(submission, BEGUN_SECONDS)

    def stop(self, submission: QueuedSubmission) -> None:
        """Record that a stop ended the evaluation; this does not count as a failure."""
        self._write(submission, running=0)

    def postpone(self, submission: QueuedSubmission, reason: str) -> float:
        """Record a fault of this machine or the network; return the seconds until the retry."""
        known = self.of(submission)
        pause = min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(known.faults, 10))
        if known.verdict is not None:
            reason = known.reason  # the verdict's, which the API has not received yet
        due = self._clock() + pause
        self._write(submission, running=0, faults=known.faults + 1, due=due, reason=reason)
        return pause

    def conclude(self, submission: QueuedSubmission, verdict: Verdict) -> None:
        """Store a verdict until the API has it; from now on, count the logit check's faults."""
        self._write(
            submission,
            running=0,
            faults=0,
            reason=verdict.reason,
            score=verdict.score,
            actual=verdict.actual,
            measured=json.dumps(verdict.measured),
            device=verdict.device,
        )

    def forget(self, submission: QueuedSubmission) -> None:
        """Delete the attempts at a submission that the API has a verdict for."""
        self._database.execute(
            "DELETE FROM attempts WHERE submission = ?", [self._name(submission)]
        )

    def reset_crashes(self) -> int:
        """Reset the crashes of all submissions; return the number of changed rows."""
        with closing(self._database.cursor()) as cursor:
            cursor.execute("UPDATE attempts SET deaths = 0 WHERE deaths > 0")
            return cursor.rowcount

    def record_time(self, submission: QueuedSubmission, seconds: float) -> None:
        """Count an evaluation's time against its client and hotkey, for the length of a round."""
        now = self._clock()
        self._database.execute("DELETE FROM spent WHERE ended < ?", [now - SPENT_SECONDS])
        rows = [(key, now, seconds) for key in _payers(submission)]
        self._database.executemany("INSERT INTO spent VALUES (?, ?, ?)", rows)

    def queue_key(self, submission: QueuedSubmission) -> tuple[int, float, float, str, int]:
        """Return the sort key of the queue.

        The client with the least evaluation time comes first, then its hotkey with the least: slow
        submissions cannot delay those of others, not even from many new hotkeys of one client.
        Among a hotkey's submissions, those that failed least often come first, then the oldest.
        """
        known = self.of(submission)
        query = "SELECT coalesce(sum(seconds), 0) FROM spent WHERE hotkey = ?"
        client, hotkey = (
            self._database.execute(query, [key]).fetchone()[0] for key in _payers(submission)
        )
        return client, hotkey, known.deaths + known.faults, *age(submission)

    def is_due(self, submission: QueuedSubmission) -> bool:
        known, now = self.of(submission), self._clock()
        clock_went_back = known.due > now + MAX_PAUSE
        return not known.skipped and (known.due <= now or clock_went_back)

    def _name(self, submission: QueuedSubmission) -> str:
        parts = (self._api_url, submission.id, submission.commit_hash, submission.created_at)
        return " ".join(map(str, parts))

    def _write(self, submission: QueuedSubmission, **values: float | str | None) -> None:
        names, marks = ", ".join(values), ", ".join("?" for _ in values)
        changes = ", ".join(f"{name} = excluded.{name}" for name in values)
        self._database.execute(
            f"INSERT INTO attempts (submission, {names}) VALUES (?, {marks}) "  # noqa: S608
            f"ON CONFLICT (submission) DO UPDATE SET {changes}",
            [self._name(submission), *values.values()],
        )
