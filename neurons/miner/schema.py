"""The journal's database file: how it is opened, checked and brought up to date."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from neurons.runtime.errors import ConfigError
from neurons.runtime.sqlite_file import SqliteFile, transaction

CLOSED_STATES = "('VALIDATED', 'RANKED', 'REJECTED', 'UNRANKED', 'PREMATURE', 'ABANDONED')"
"""The states of `cycle.CLOSED` in SQL; a change requires the index below to be rebuilt."""

MIGRATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "submissions",
        (
            """CREATE TABLE submissions (
                id INTEGER PRIMARY KEY AUTOINCREMENT,
                hotkey TEXT NOT NULL,
                target_sequence_length INTEGER NOT NULL,
                mode TEXT NOT NULL,
                publish_at TEXT NOT NULL,
                api_url TEXT NOT NULL,
                auto_target INTEGER NOT NULL,
                state TEXT NOT NULL,
                resume_state TEXT,
                content_digest TEXT,
                fork_url TEXT,
                commit_hash TEXT,
                report TEXT,
                tokens_per_sec REAL,
                vram_mb REAL,
                benchmarks TEXT,
                salt TEXT,
                commitment_hash TEXT,
                round_id INTEGER,
                submission_id INTEGER,
                reveal_block INTEGER,
                rank INTEGER,
                weight REAL,
                score REAL,
                weighted_score REAL,
                reason TEXT,
                remedy TEXT,
                retry_at REAL,
                attempts INTEGER NOT NULL,
                created_at REAL NOT NULL,
                updated_at REAL NOT NULL
            )""",
            """CREATE UNIQUE INDEX one_live_submission
                ON submissions (hotkey, target_sequence_length)
                WHERE state NOT IN ('VALIDATED', 'REJECTED', 'UNRANKED', 'ABANDONED')""",
        ),
    ),
    (
        "events",
        (
            """CREATE TABLE events (
                id INTEGER PRIMARY KEY AUTOINCREMENT,
                submission INTEGER NOT NULL REFERENCES submissions (id) ON DELETE CASCADE,
                at REAL NOT NULL,
                kind TEXT NOT NULL,
                state TEXT NOT NULL,
                note TEXT
            )""",
            "CREATE INDEX events_of_submission ON events (submission)",
        ),
    ),
    (
        "judged before the reveal",
        (
            "ALTER TABLE submissions ADD COLUMN round_start TEXT",
            "ALTER TABLE submissions ADD COLUMN round_total INTEGER",
            "ALTER TABLE submissions ADD COLUMN queued_at REAL",
            "ALTER TABLE submissions ADD COLUMN judged_early_at REAL",
            "DROP INDEX one_live_submission",
            """CREATE UNIQUE INDEX one_live_submission
                ON submissions (hotkey, target_sequence_length)
                WHERE state NOT IN
                ('VALIDATED', 'RANKED', 'REJECTED', 'UNRANKED', 'PREMATURE', 'ABANDONED')""",
            "CREATE TABLE apis (url TEXT PRIMARY KEY, judges_early_at REAL NOT NULL)",
        ),
    ),
    (
        "rows of the hotkey that another state folder sent",
        (
            """CREATE TABLE strangers (
                api_url TEXT NOT NULL,
                hotkey TEXT NOT NULL,
                submission_id INTEGER NOT NULL,
                seen_at REAL NOT NULL,
                PRIMARY KEY (api_url, hotkey, submission_id)
            )""",
        ),
    ),
)
"""Name and statements of each migration, in order. A change of the schema is a new entry: released
entries are never edited.
"""


JOURNAL = SqliteFile(
    "journal",
    "Put a backup in its place, or recover it (`sqlite3 {path} .recover | sqlite3 "
    "recovered.sqlite`), or move it away to start with an empty one; then a commitment that waits "
    "for its reveal is lost with its salt.",
)


def open_database(path: Path) -> sqlite3.Connection:
    """Open the journal at `path` and apply missing migrations.

    Raises the errors of `SqliteFile.open`, and a ConfigError if it is of a newer version.
    """
    return JOURNAL.open(path, partial(_migrate, path=path))


def copy_database(path: Path) -> sqlite3.Connection:
    """Return a copy of the journal in memory, with all migrations; only read the file.

    Raises the errors of `open_database`.
    """
    if path.exists() and not os.access(path, os.R_OK, effective_ids=True):
        raise ConfigError(f"The journal {path} cannot be read. Check its owner and mode.")
    copy = sqlite3.connect(":memory:", isolation_level=None)
    with JOURNAL.explained(copy, path):
        with closing(open_read_only(path)) as file:
            file.execute("PRAGMA query_only = ON")
            file.backup(copy)
        JOURNAL.check(copy)
        _migrate(copy, path)
    return copy


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open an existing database without the right to write; a missing file is an error."""
    # as_uri escapes `#`, `?` and `%`, which would end or change the path of a plain address
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def write_copy(source: Path, target: Path) -> None:
    """Replace `target` by a copy of the journal `source`, in one file of mode 0600.

    The copy is on the disk before it gets its name. Raises a ConfigError, and leaves `target` as it
    is, if the copy fails or would not contain a journal.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        part.unlink(missing_ok=True)  # one that a killed writer left
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with closing(open_read_only(source)) as original, closing(sqlite3.connect(part)) as copy:
            original.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # readable from a read-only disk, too
            if not copy.execute("PRAGMA table_info(submissions)").fetchall():
                raise ConfigError(
                    f"{source} has no table of submissions, so it is not a journal, and it was not "
                    "copied. Name the journal of a miner, or a file that `backup` made."
                )
        os.replace(part, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{source} cannot be copied to {target}: {error}.") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _migrate(database: sqlite3.Connection, path: Path) -> None:
    database.execute(
        "CREATE TABLE IF NOT EXISTS applied "
        "(version INTEGER PRIMARY KEY, name TEXT NOT NULL, at TEXT DEFAULT CURRENT_TIMESTAMP)"
    )
    version = database.execute("SELECT coalesce(max(version), 0) FROM applied").fetchone()[0]
    if version > len(MIGRATIONS):
        raise ConfigError(
            f"The journal {path} was written by a newer version of this program (schema "
            f"{version}, this one knows {len(MIGRATIONS)}). It was left as it is. Update the "
            "program, or put the copy from before the update in its place."
        )
    for number, (name, statements) in enumerate(MIGRATIONS[version:], start=version + 1):
        with transaction(database):
            for statement in statements:
                database.execute(statement)
            database.execute("INSERT INTO applied (version, name) VALUES (?, ?)", (number, name))
