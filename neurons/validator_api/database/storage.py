"""Transactions on the API's database, SQLite (WAL) or PostgreSQL. Nothing here knows HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import create_engine, event, make_url
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from neurons.errors import ConfigError
from neurons.validator_api.database.versions import bring_up_to_date

Result = TypeVar("Result")

BUSY_SECONDS = 30
WRITE_LOCK = 24
"""The number of PostgreSQL's advisory lock that writers share."""


class Storage:
    """The database behind the API, brought to the present version when it is opened.

    Raises:
        ConfigError: DATABASE_URL cannot be read, its driver is missing, the server is away, or a
            newer program has changed the database.

    Attributes:
        writes: how many transactions this process has committed.
    """

    def __init__(self, database_url: str) -> None:
        self._engine = _engine(database_url)
        writing = self._engine.execution_options(writes=True)
        self._writers = sessionmaker(writing)
        self._readers = sessionmaker(self._engine)
        self._turn = threading.Lock()
        self.writes = 0
        try:
            with writing.begin() as connection:
                bring_up_to_date(connection, self.url)
        except SQLAlchemyError as error:
            raise ConfigError(
                f"DATABASE_URL={self.url}: the database does not answer "
                f"({type(error).__name__}). Check that it runs, the name and the password."
            ) from error

    @property
    def url(self) -> str:
        """The URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session that changes nothing."""
        with self._readers() as session:
            yield session

    def write(self, work: Callable[[Session], Result]) -> Result:
        """Run `work` in one transaction and commit it.

        Writers come one after another, also those of other servers on the same database, so that
        what `work` has checked still holds when it writes. Those of this process wait here, where
        they hold no connection.
        """
        with self._turn:
            with self._writers.begin() as session:
                result = work(session)
            self.writes += 1
        return result

    def close(self) -> None:
        """Give all connections back."""
        self._engine.dispose()


def _engine(database_url: str) -> Engine:
    try:
        url = make_url(database_url)
        if url.drivername in ("postgres", "postgresql"):
            url = url.set(drivername="postgresql+psycopg")
        if url.get_backend_name() == "sqlite":
            return _sqlite(url)
        if url.get_backend_name() == "postgresql":
            return _postgresql(url)
        raise ArgumentError(f"no support for {url.get_backend_name()}")
    except ArgumentError as error:
        raise ConfigError(
            "DATABASE_URL cannot be read. Write sqlite:///path/to/file.db or "
            "postgresql://user:password@host/name."
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"DATABASE_URL needs the Python module {error.name!r}: "
            "run scripts/install.sh postgresql."
        ) from error


def _postgresql(url: URL) -> Engine:
    engine = create_engine(url, pool_pre_ping=True, pool_recycle=3600)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get("writes", False):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITE_LOCK})")

    return engine


def _sqlite(url: URL) -> Engine:
    if url.database:
        folder = Path(url.database).parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"DATABASE_URL={url}: the folder {folder} cannot be made ({error.strerror}). "
                "Choose one that this user may write to."
            ) from error
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # BEGIN is written below, not by the driver
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
