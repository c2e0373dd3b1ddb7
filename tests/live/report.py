"""Compares the public database with the miner's journal, and reports findings."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from neurons.miner.cycle import CLOSED, VERDICTS
from neurons.miner.schema import open_read_only
from neurons.runtime.errors import EX_CONFIG

NO_VERDICT = ("ended before a validator", "cannot be known", "never seen in the queue")
"""The reasons of UNRANKED submissions that do not state that a validator judged them."""


@dataclass(frozen=True)
class Row:
    """One row of the public `speed_submissions`."""

    life: int  # the number of its database, from 1; a wipe starts the next one
    present: bool  # whether this database is the last one
    id: int
    commitment_hash: str | None
    commit_hash: str | None
    tokens_per_sec: float
    is_revealed: bool
    validated: bool
    score: float | None

    @property
    def premature(self) -> bool:
        """Whether it was judged and never revealed."""
        return self.validated and not self.is_revealed

    def words(self) -> str:
        score = "-" if self.score is None else f"{self.score:.3f}"
        return (
            f"{self.life}/{self.id} {'direct' if self.commitment_hash is None else 'commit'} "
            f"revealed={self.is_revealed:d} validated={self.validated:d} score={score} "
            f"claim={self.tokens_per_sec:.1f}"
        )


@dataclass(frozen=True)
class Entry:
    id: int
    mode: str
    state: str
    reason: str
    commit_hash: str | None
    tokens_per_sec: float | None
    commitment_hash: str | None
    score: float | None
    created_at: float
    holds: tuple[str, ...] = ()  # the reason of each time it was HELD

    def owns(self, row: Row) -> bool:
        if row.commitment_hash is not None:
            return row.commitment_hash == self.commitment_hash
        claims = [(each.commit_hash, each.tokens_per_sec) for each in (row, self)]
        return self.commitment_hash is None and claims[0] == claims[1]


@dataclass
class Cycle:
    number: int
    mode: str
    began: float  # Unix seconds; later submissions belong to this cycle or a later one
    starts: int = 1  # of the miner, also after a kill or a HELD
    status: int | None = None  # the last exit status; None after the time limit
    sent: Counter[str] = field(default_factory=Counter)  # by `METHOD route status`, at the API
    faults: Counter[str] = field(default_factory=Counter)
    trouble: str = ""  # when the API's database was emptied or the miner killed
    entries: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """Something that must not happen."""

    kind: str
    cycle: int
    words: str


def read_rows(databases: Sequence[Path], hotkey: str) -> list[Row]:
    query = "SELECT * FROM speed_submissions WHERE miner_hotkey = ? ORDER BY id"
    return [
        Row(
            life=life,
            present=life == len(databases),
            id=row["id"],
            commitment_hash=row["commitment_hash"],
            commit_hash=row["commit_hash"],
            tokens_per_sec=row["tokens_per_sec"],
            is_revealed=bool(row["is_revealed"]),
            validated=bool(row["validated"]),
            score=row["score"] if "score" in row.keys() else None,  # noqa: SIM118 - not a dict
        )
        for life, path in enumerate(databases, 1)
        for row in _select(path, query, hotkey)
    ]


def read_journal(path: Path, hotkey: str) -> list[Entry]:
    """Return the hotkey's submissions, oldest first; a salt is never read."""
    query = (
        "SELECT id, mode, state, coalesce(reason, '') AS reason, commit_hash, tokens_per_sec, "
        "commitment_hash, score, created_at FROM submissions WHERE hotkey = ? ORDER BY id"
    )
    holds = (
        "SELECT submission, note FROM events JOIN submissions ON submissions.id = submission "
        "WHERE hotkey = ? AND events.state = 'HELD' ORDER BY events.id"
    )
    notes = _select(path, holds, hotkey)
    return [
        Entry(
            **dict(row),
            holds=tuple(note["note"] for note in notes if note["submission"] == row["id"]),
        )
        for row in _select(path, query, hotkey)
    ]


def assign(entries: Iterable[Entry], cycles: Sequence[Cycle]) -> None:
    """Assign each submission to the cycle that made it."""
    for cycle in cycles:
        cycle.entries = []
    for entry in entries:
        made = [cycle for cycle in cycles if cycle.began <= entry.created_at]
        made[-1].entries.append(entry)


def judge(cycles: Sequence[Cycle], rows: Sequence[Row]) -> list[Finding]:
    """Return the findings in the order of the cycles."""
    findings = []
    for cycle in cycles:
        own = {entry.id: [row for row in rows if entry.owns(row)] for entry in cycle.entries}
        findings += _duplicates(cycle, [row for each in own.values() for row in each])
        for entry in cycle.entries:
            findings += _misjudged(cycle, entry, own[entry.id])
        findings += _stops(cycle)
    known = {row for cycle in cycles for e in cycle.entries for row in rows if e.owns(row)}
    findings += [
        Finding("lost", 0, f"no submission of the journal has row {row.words()}")
        for row in rows
        if row.present and row not in known
    ]
    return findings


def _duplicates(cycle: Cycle, rows: Sequence[Row]) -> list[Finding]:
    """Return two rows of one claim or commitment, and two live commitments, as findings."""
    own, problems = set(rows), []
    claims = Counter((r.life, r.commit_hash, r.tokens_per_sec) for r in own if r.is_revealed)
    problems += [f"{count} rows of one claim" for count in claims.values() if count > 1]
    hashes = Counter((row.life, row.commitment_hash) for row in own if row.commitment_hash)
    problems += [f"{count} rows of one commitment" for count in hashes.values() if count > 1]
    live = Counter(row.life for row in own if row.commitment_hash and not row.premature)
    problems += [f"{count} live commitments" for count in live.values() if count > 1]
    listed = "; ".join(sorted(row.words() for row in own))
    return [Finding("duplicate", cycle.number, f"{words}: {listed}") for words in problems]


def _misjudged(cycle: Cycle, entry: Entry, rows: Sequence[Row]) -> list[Finding]:
    """Return false verdicts, and unjudged rows of closed submissions, as findings."""
    findings = []
    state = f"submission {entry.id} is {entry.state}"
    judged = entry.state in VERDICTS and not any(words in entry.reason for words in NO_VERDICT)
    if judged and not any(_confirms(row, entry) for row in rows):
        findings.append(Finding("false verdict", cycle.number, f"{state}, but {_listed(rows)}"))
    waiting = [row for row in rows if row.present and not row.validated]
    if entry.state in CLOSED and waiting:
        findings.append(Finding("lost", cycle.number, f"{state}, but {_listed(waiting)} waits"))
    return findings


def _confirms(row: Row, entry: Entry) -> bool:
    """Return whether the server's row confirms the miner's verdict.

    A commitment with a score of 0 was judged before its reveal, because the claims of these runs
    are far below the measurements.
    """
    if not row.validated or (entry.score is not None and entry.score != row.score):
        return False
    premature = row.commitment_hash is not None and (not row.is_revealed or row.score == 0)
    return {
        "VALIDATED": not premature and (row.score or 0.0) > 0,
        "RANKED": not premature,
        "REJECTED": row.score == 0,
        "PREMATURE": premature,
        "UNRANKED": True,
    }[entry.state]


def _stops(cycle: Cycle) -> list[Finding]:
    """Return unfinished submissions, and those that waited for the operator, as findings."""
    person, unfinished = [], []
    if cycle.status == EX_CONFIG:
        person.append(f"exit status {EX_CONFIG}")
    if cycle.status is None:
        unfinished.append("the time ran out")
    elif not cycle.entries and cycle.status != EX_CONFIG:
        unfinished.append(f"no submission was made; exit status {cycle.status}")
    for entry in cycle.entries:
        person += [f"submission {entry.id} was HELD: {reason}" for reason in entry.holds]
        if entry.state not in CLOSED:
            unfinished.append(f"submission {entry.id} is still {entry.state}: {entry.reason}")
    kinds = {"needs the operator": person, "unfinished": unfinished}
    return [Finding(kind, cycle.number, text) for kind, texts in kinds.items() for text in texts]


def table(cycles: Sequence[Cycle], rows: Sequence[Row], findings: Sequence[Finding]) -> str:
    lines = []
    for cycle in cycles:
        again = f", started {cycle.starts} times" if cycle.starts > 1 else ""
        trouble = f", {cycle.trouble}" if cycle.trouble else ""
        title = f"cycle {cycle.number} ({cycle.mode}), exit status {cycle.status}"
        lines.append(title + again + trouble)
        for entry in cycle.entries:
            lines.append(f"  miner   {entry.id} {entry.state}  {entry.reason}".rstrip())
            lines += [f"  server  {row.words()}" for row in rows if entry.owns(row)]
        lines.append(f"  sent    {_counted(cycle.sent)}")
        if cycle.faults:
            lines.append(f"  faults  {_counted(cycle.faults)}")
    states = Counter(entry.state for cycle in cycles for entry in cycle.entries)
    lines += ["", f"{len(cycles)} cycles; the miner's ends: {_counted(states)}"]
    for kind in ("duplicate", "lost", "false verdict", "needs the operator", "unfinished"):
        alike = [finding for finding in findings if finding.kind == kind]
        lines.append(f"{kind:18} {len(alike)}")
        lines += [f"  cycle {finding.cycle}: {finding.words}" for finding in alike]
    return "\n".join(lines)


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in sorted(counter.items())) or "nothing"


def _listed(rows: Sequence[Row]) -> str:
    return "; ".join(row.words() for row in rows) or "the server never had it"


def _select(path: Path, query: str, *values: str) -> list[sqlite3.Row]:
    if not path.exists():
        return []
    with closing(open_read_only(path)) as database:
        database.row_factory = sqlite3.Row
        return database.execute(query, values).fetchall()
