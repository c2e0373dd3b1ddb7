"""The API's database: tables and transactions, on SQLite (WAL) or PostgreSQL.

Times are naive UTC. Nothing here knows HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnExpressionArgument,
    ForeignKey,
    create_engine,
    event,
    func,
    make_url,
    select,
)
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from neurons.errors import ConfigError

Result = TypeVar("Result")

BUSY_SECONDS = 30
WRITE_LOCK = 24
"""The number of PostgreSQL's advisory lock that writers share."""


class Base(DeclarativeBase):
    """Base of the tables."""

    def facts(self) -> dict[str, Any]:
        """Return the columns by name, with times as the wire has them."""
        values = {one.key: getattr(self, one.key) for one in self.__table__.columns}
        times = {k: v.isoformat() for k, v in values.items() if isinstance(v, datetime)}
        return values | times


class Miner(Base):
    """A registered hotkey and the uid that weights name it by."""

    __tablename__ = "miners"

    hotkey: Mapped[str] = mapped_column(primary_key=True)
    uid: Mapped[int] = mapped_column(unique=True)
    registered_at: Mapped[datetime]


class LeagueEntry(Base):
    """A hotkey's registration for one model and league."""

    __tablename__ = "league_entries"

    hotkey: Mapped[str] = mapped_column(ForeignKey("miners.hotkey"), primary_key=True)
    model_name: Mapped[str] = mapped_column(primary_key=True)
    league: Mapped[str] = mapped_column(primary_key=True)
    registered_at: Mapped[datetime]


class Round(Base):
    """A competition round: `active`, then `completed` with its winner, if anyone scored.

    `baseline_submission_id` is the winner of the round before: a submission must beat it to rank.
    """

    __tablename__ = "rounds"

    id: Mapped[int] = mapped_column(primary_key=True)
    round_number: Mapped[int] = mapped_column(unique=True)
    start_time: Mapped[datetime]
    end_time: Mapped[datetime]
    status: Mapped[str] = mapped_column(index=True)
    baseline_submission_id: Mapped[int | None]
    winner_submission_id: Mapped[int | None]
    winner_hotkey: Mapped[str | None]


class Submission(Base):
    """A submission, from its commit (or its direct submission) to its score.

    `created_at` is the commit's time; fork, hash and figures are empty until the reveal.
    """

    __tablename__ = "submissions"

    id: Mapped[int] = mapped_column(primary_key=True)
    miner_hotkey: Mapped[str] = mapped_column(ForeignKey("miners.hotkey"), index=True)
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"), index=True)
    target_sequence_length: Mapped[int]
    signature: Mapped[str]
    ip_address: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(index=True)

    commitment_hash: Mapped[str | None] = mapped_column(unique=True)
    commitment_salt: Mapped[str | None]
    reveal_block: Mapped[int | None] = mapped_column(BigInteger)
    is_revealed: Mapped[bool]

    fork_url: Mapped[str | None]
    commit_hash: Mapped[str | None]
    repo_hash: Mapped[str | None]
    docker_image: Mapped[str | None]
    tokens_per_sec: Mapped[float | None]
    vram_mb: Mapped[float | None]
    benchmarks: Mapped[dict[str, Any] | None] = mapped_column(JSON)

    validated_at: Mapped[datetime | None] = mapped_column(index=True)
    score: Mapped[float | None]
    verification_passed: Mapped[bool | None]
    cosine_similarity: Mapped[float | None]
    max_abs_diff: Mapped[float | None]
    throughput_verified: Mapped[float | None]
    verification_reason: Mapped[str | None]


class IpBan(Base):
    """Failures counted against an address since its last success, and the ban they led to."""

    __tablename__ = "ip_bans"

    ip_address: Mapped[str] = mapped_column(primary_key=True)
    failure_count: Mapped[int]
    banned_until: Mapped[datetime | None]


def count(session: Session, *where: ColumnExpressionArgument[bool]) -> int:
    """Count the submissions of which every condition holds."""
    return session.scalar(select(func.count()).select_from(Submission).where(*where)) or 0


class Storage:
    """The database behind the API.

    Raises:
        ConfigError: DATABASE_URL cannot be read, its driver is missing or the server is away.
    """

    def __init__(self, database_url: str) -> None:
        self._engine = _engine(database_url)
        self._writers = sessionmaker(self._engine.execution_options(writes=True))
        self._readers = sessionmaker(self._engine)
        try:
            Base.metadata.create_all(self._engine.execution_options(writes=True))
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
        what `work` has checked still holds when it writes.
        """
        with self._writers.begin() as session:
            return work(session)

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
