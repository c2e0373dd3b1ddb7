"""Transactions on the API's database, SQLite (WAL) or PostgreSQL, and its availability."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import create_engine, event, inspect, make_url
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.orm import Session, sessionmaker

from neurons.runtime.addresses import require_name
from neurons.runtime.errors import ConfigError, Problem, QuasarError
from neurons.runtime.observe import get_logger, redact_text

MIGRATIONS = Path(__file__).with_name("migrations")
BEFORE_ALEMBIC = "0001"
"""The version of a database that has the tables but no table `alembic_version`."""
BUSY_SECONDS = 10.0
"""Seconds that a transaction waits: for other writes of this process, a connection or SQLite."""
CONNECTION = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""libpq's timeouts for a server that does not answer; options in DATABASE_URL take precedence."""
WRITE_LOCK = 24
"""The number of the PostgreSQL advisory lock that each writer holds."""
TEMPORARY = (OperationalError, InterfaceError, NoConnection)
"""Errors of drivers if a database does not answer, is locked, or has no space left."""
LOCKED = ("locked", "busy")
"""Parts of SQLite's messages if another process uses the file."""
REFUSED_FOR_NOW = ("starting up", "shutting down", "not yet accepting", "too many", "slots")
"""Parts of PostgreSQL's FATAL messages about faults that end without the operator."""

log = get_logger("validator_api")


class DatabaseAway(QuasarError):
    """The database cannot be used now; the same call may succeed later."""


class Storage:
    """The API's database; opening it migrates it to the current version.

    Raises a ConfigError if it cannot be used, and DatabaseAway if its server cannot be reached.
    """

    def __init__(self, database_url: str | URL) -> None:
        self._engine = _engine(database_url)
        writing = self._engine.execution_options(writes=True)
        self._writers = sessionmaker(writing, expire_on_commit=False)  # pages use rows afterwards
        self._readers = sessionmaker(self._engine)
        self._write_lock = threading.Lock()
        self._failing_since: dict[str, float] = {}  # by the kind of transaction
        self._failing_lock = threading.Lock()
        try:
            with writing.begin() as connection:
                _migrate(connection, self.url)
        except SQLAlchemyError as error:
            raise self._open_error(error) from error

    @property
    def url(self) -> str:
        """The URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session that changes nothing; raise DatabaseAway if the database fails."""
        with self._watched("read"), self._readers() as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a session and commit it at the end; after an exception, nothing is written.

        Writers run one after another, even those of several servers on one database, so that a
        check is still valid when its transaction writes. After DatabaseAway nothing was written,
        unless the connection was lost during the commit; repeating the call shows which.
        """
        if not self._write_lock.acquire(timeout=BUSY_SECONDS):
            raise DatabaseAway(f"earlier writes take longer than {BUSY_SECONDS:.0f} s")
        try:
            with self._watched("write"), self._writers.begin() as session:
                yield session
        finally:
            self._write_lock.release()

    @contextmanager
    def _watched(self, kind: str) -> Iterator[None]:
        """Surround a transaction: raise its temporary errors as DatabaseAway, and log an outage.

        Reads and writes fail separately: on a full disk only writes fail.
        """
        try:
            yield
        except TEMPORARY as error:
            reason = _reason(error)
            with self._failing_lock:
                first = not self._failing_since
                self._failing_since.setdefault(kind, time.monotonic())
            if first:
                log.error(
                    "the database is unavailable; requests get 503 until it answers",
                    database=self.url,
                    reason=reason,
                )
            raise DatabaseAway(reason) from error
        with self._failing_lock:
            since = self._failing_since.pop(kind, None)
            if since is not None and not self._failing_since:
                log.info("the database is back", seconds=round(time.monotonic() - since, 1))

    def close(self) -> None:
        self._engine.dispose()

    def _open_error(self, error: SQLAlchemyError) -> ConfigError | DatabaseAway:
        """Return the exception for a database that could not be opened."""
        problem = f"DATABASE_URL={self.url}: the database cannot be opened ({_reason(error)})"
        server = self._engine.dialect.name == "postgresql"
        refused = "FATAL" in problem and not any(words in problem for words in REFUSED_FOR_NOW)
        if server and isinstance(error, OperationalError) and not refused:
            return DatabaseAway(f"{problem}. Check its host and port, and that it runs.")
        if server:
            return ConfigError(f"{problem}. Check its name, the user and the password.")
        if isinstance(error, OperationalError) and any(word in problem for word in LOCKED):
            return DatabaseAway(f"{problem}. Another process uses the file.")
        return ConfigError(f"{problem}. Name a file of SQLite that this user may write to.")


def _migrate(connection: Connection, url: str) -> None:
    """Migrate a database of any earlier version; raise a ConfigError for a newer one."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    tables = set(inspect(connection).get_table_names())
    try:
        if "submissions" in tables and "alembic_version" not in tables:
            log.info("taking over the database of an earlier version", database=url)
            command.stamp(config, BEFORE_ALEMBIC)
        command.upgrade(config, "head")
    except CommandError as error:
        raise ConfigError(
            Problem(
                f"DATABASE_URL={url} cannot be brought to this program's version ({error}).",
                "Run the newest program on it, or put back the copy from before the update.",
            )
        ) from error


def _engine(database_url: str | URL) -> Engine:
    try:
        url = make_url(database_url)
        if url.drivername in ("postgres", "postgresql"):
            url = url.set(drivername="postgresql+psycopg")
        if url.get_backend_name() == "sqlite":
            return _sqlite(url)
        if url.get_backend_name() == "postgresql":
            if url.host and ":" not in url.host:
                require_name(url.host)
            return _postgresql(url)
        raise ArgumentError(f"no support for {url.get_backend_name()}")
    except (ArgumentError, ValueError) as error:
        raise ConfigError(
            "DATABASE_URL cannot be read. Write sqlite:///FOLDER/FILE, or postgresql:// with "
            "user, password, host and name as .env.example shows."
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"DATABASE_URL needs the Python module {error.name!r}: "
            "run scripts/install.sh postgresql."
        ) from error


def _postgresql(url: URL) -> Engine:
    own = {name: value for name, value in CONNECTION.items() if name not in url.query}
    engine = create_engine(
        url, pool_pre_ping=True, pool_recycle=3600, pool_timeout=BUSY_SECONDS, connect_args=own
    )

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get("writes", False):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITE_LOCK})")

    return engine


def _sqlite(url: URL) -> Engine:
    if url.database:
        with suppress(OSError):  # opening the file reports it
            Path(url.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def _reason(error: SQLAlchemyError) -> str:
    """Return the driver's message without the statement and values that SQLAlchemy adds."""
    return redact_text(str(error.orig if isinstance(error, DBAPIError) else error))
