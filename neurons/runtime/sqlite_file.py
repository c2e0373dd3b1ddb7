"""Opens the SQLite files of the miner and the validator, and explains their faults."""

from __future__ import annotations

import os
import shlex
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from neurons.runtime.errors import ConfigError, QuasarError
from neurons.runtime.process import DISK_FAULTS

BUSY_MILLISECONDS = 5000


class SqliteFile(NamedTuple):
    """A kind of file: its name in messages, and the remedy if such a file is damaged.

    `{path}` in the remedy stands for the quoted path.
    """

    name: str
    remedy: str

    def open(self, path: Path, prepare: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
        """Open or create the file with mode 0600, check it, and let `prepare` make its tables.

        A commit is on the disk before it returns. Raises a ConfigError if the file is damaged or
        cannot be opened, and a QuasarError if the disk is full or another process locks it. The
        file is kept.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.parent.chmod(0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            path.chmod(0o600)
        except OSError as error:
            if error.errno in DISK_FAULTS:
                raise QuasarError(
                    f"The {self.name} {path} cannot be used at the moment ({error.strerror}). Free "
                    "space on its disk and start again."
                ) from error
            raise ConfigError(
                f"The {self.name} {path} cannot be opened ({error.strerror}). Check the owner and "
                "the mode of the folder STATE_DIR, or give another one."
            ) from error
        database = sqlite3.connect(path, timeout=BUSY_MILLISECONDS / 1000, isolation_level=None)
        with self.explained(database, path):
            self.check(database)
            prepare(database)
        return database

    @contextmanager
    def explained(self, database: sqlite3.Connection, path: Path) -> Iterator[None]:
        """Close the database if the block fails, and raise an error that names the file's fault."""
        database.row_factory = sqlite3.Row
        try:
            yield
        except BaseException as error:
            database.close()
            if isinstance(error, sqlite3.OperationalError):
                raise QuasarError(
                    f"The {self.name} {path} cannot be used at the moment ({error}). Free space on "
                    "its disk, or end the process that locks it, and start again."
                ) from error
            if isinstance(error, sqlite3.DatabaseError):
                reason = " ".join(str(error).split())
                remedy = self.remedy.format(path=shlex.quote(str(path)))
                raise ConfigError(
                    f"The {self.name} {path} is damaged ({reason}). It was left as it is. {remedy}"
                ) from error
            raise

    @staticmethod
    def check(database: sqlite3.Connection) -> None:
        """Raise a DatabaseError for damaged content; make each commit wait for the disk."""
        problem = database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(str(problem))
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            database.execute(f"PRAGMA {pragma}")


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit all changes of the block together, or roll them back after an exception."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
