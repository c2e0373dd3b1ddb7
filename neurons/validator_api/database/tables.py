"""The tables of the current version; `migrations/` brings every earlier database to it.

Times are naive UTC.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnExpressionArgument,
    Double,
    ForeignKey,
    Index,
    String,
    func,
    select,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from neurons.wire import rules

ACTIVE = "active"
COMPLETED = "completed"
"""The status of a round."""


class Base(DeclarativeBase):
    """Base of the tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {float: Double()}

    def facts(self) -> dict[str, Any]:
        """Return the columns by name, with times as ISO 8601 text, as on the wire."""
        values = {one.key: getattr(self, one.key) for one in self.__table__.columns}
        times = {k: v.isoformat() for k, v in values.items() if isinstance(v, datetime)}
        return values | times


class Miner(Base):
    """A registered hotkey."""

    __tablename__ = "miners"

    hotkey: Mapped[str] = mapped_column(primary_key=True)
    uid: Mapped[int] = mapped_column(unique=True)  # for the weights, unless the chain has uids
    registered_at: Mapped[datetime]


class LeagueEntry(Base):
    """A hotkey's registration for one model and league."""

    __tablename__ = "league_entries"

    hotkey: Mapped[str] = mapped_column(ForeignKey("miners.hotkey"), primary_key=True)
    model_name: Mapped[str] = mapped_column(primary_key=True)
    league: Mapped[str] = mapped_column(primary_key=True)
    registered_at: Mapped[datetime]


class Round(Base):
    """A competition round: `active`, then `completed` with its winner, if anyone scored."""

    __tablename__ = "rounds"

    id: Mapped[int] = mapped_column(primary_key=True)
    round_number: Mapped[int] = mapped_column(unique=True)
    start_time: Mapped[datetime]
    end_time: Mapped[datetime]  # the planned end, or the actual one of a round that ended early
    status: Mapped[str] = mapped_column(index=True)
    baseline_submission_id: Mapped[int | None]  # an earlier winner; only better results rank
    winner_submission_id: Mapped[int | None]
    winner_hotkey: Mapped[str | None]
    ranking: Mapped[rules.Ranking] = mapped_column(String(), server_default="claim")


class Place(Base):
    """A submission's place in a completed round, as it was when the round ended."""

    __tablename__ = "places"

    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    submission_id: Mapped[int] = mapped_column(ForeignKey("submissions.id"), primary_key=True)
    rank: Mapped[int]
    weighted_score: Mapped[float]
    # share of the emission; 0.0 from the fifth hotkey on, and for all but a hotkey's best row
    weight: Mapped[float]
    uid: Mapped[int | None]  # missing if the chain did not know the hotkey


_WAITING = text("validated_at IS NULL AND withdrawn_at IS NULL")


class Submission(Base):
    """A submission, from its commit (or its direct submission) to its score."""

    __tablename__ = "submissions"
    __table_args__ = (
        Index("ix_submissions_open", "is_revealed", "validated_at", "withdrawn_at", "id"),
        # Finds a hotkey's open submissions among any number of old ones.
        Index(
            "ix_submissions_waiting",
            *("miner_hotkey", "id"),
            postgresql_where=_WAITING,
            sqlite_where=_WAITING,
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    miner_hotkey: Mapped[str] = mapped_column(ForeignKey("miners.hotkey"), index=True)
    # the round in which it may rank: an open submission moves to the next one when this one ends
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"), index=True)
    target_sequence_length: Mapped[int]
    signature: Mapped[str]
    ip_address: Mapped[str | None]  # the client's key for bans (`bans.ban_key`)
    created_at: Mapped[datetime] = mapped_column(index=True)  # the time of the commit
    # when a newer submission replaced it, its client was banned, or its commitment expired
    withdrawn_at: Mapped[datetime | None]

    commitment_hash: Mapped[str | None] = mapped_column(unique=True)
    commitment_version: Mapped[int | None]
    commitment_salt: Mapped[str | None]
    reveal_block: Mapped[int | None] = mapped_column(BigInteger)
    is_revealed: Mapped[bool]
    revealed_at: Mapped[datetime | None]

    # From here to `benchmarks`, columns are empty until the reveal.
    fork_url: Mapped[str | None]
    commit_hash: Mapped[str | None]
    repo_hash: Mapped[str | None]
    docker_image: Mapped[str | None]
    tokens_per_sec: Mapped[float | None]
    vram_mb: Mapped[float | None]
    benchmarks: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # the miner's, by length

    validated_at: Mapped[datetime | None] = mapped_column(index=True)
    score: Mapped[float | None]
    validator_hotkey: Mapped[str | None]
    validator_device: Mapped[str | None]  # a GPU's name, or the CPU's cores
    verdict_reason: Mapped[str | None]
    measured: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # the validator's, by length
    verification_passed: Mapped[bool | None]
    cosine_similarity: Mapped[float | None]
    max_abs_diff: Mapped[float | None]
    throughput_verified: Mapped[float | None]
    verification_reason: Mapped[str | None]


OPEN = (Submission.validated_at.is_(None), Submission.withdrawn_at.is_(None))
"""Conditions of an open submission, which waits for its reveal or for a validator."""
IN_QUEUE = (Submission.is_revealed.is_(True), *OPEN)
"""Conditions of a submission in the validators' queue, which it enters with its reveal."""


class IpBan(Base):
    """A client's failures since its last success, and the resulting ban."""

    __tablename__ = "ip_bans"

    # an IPv4 address, an IPv6 network or `hotkey 5...`
    ip_address: Mapped[str] = mapped_column(primary_key=True)
    failure_count: Mapped[int]
    banned_until: Mapped[datetime | None]


class UsedNonce(Base):
    """A nonce of a validator's signed request, kept while its timestamp would be accepted."""

    __tablename__ = "used_nonces"

    hotkey: Mapped[str] = mapped_column(primary_key=True)
    nonce: Mapped[str] = mapped_column(primary_key=True)
    expires_at: Mapped[datetime] = mapped_column(index=True)


def count(session: Session, *where: ColumnExpressionArgument[bool]) -> int:
    return session.scalar(select(func.count()).select_from(Submission).where(*where)) or 0
