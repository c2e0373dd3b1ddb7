"""The tables of the present version; `migrations/` brings every earlier database to it.

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
    func,
    select,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

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
    """A registered hotkey, and its uid in the weights unless the chain has one."""

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

    `end_time` is the planned end, and the real one if the round was ended early.
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


class Place(Base):
    """A submission's place in a completed round, as it was when the round ended.

    `weight` is the hotkey's share of the emission, 0.0 beyond the fourth and for the further
    submissions of one hotkey. `uid` is missing where the chain did not know the hotkey.
    """

    __tablename__ = "places"

    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    submission_id: Mapped[int] = mapped_column(ForeignKey("submissions.id"), primary_key=True)
    rank: Mapped[int]
    weighted_score: Mapped[float]
    weight: Mapped[float]
    uid: Mapped[int | None]


_WAITING = text("validated_at IS NULL AND withdrawn_at IS NULL")


class Submission(Base):
    """A submission, from its commit (or its direct submission) to its score.

    `created_at` is the commit's time; fork, hash and figures are empty until the reveal. The round
    is the one that it may rank in: an open submission moves to the next round when its round ends.
    `withdrawn_at` is when a newer one of the same hotkey replaced it, its client was banned, or its
    commitment expired.
    `measured` has a validator's figures by length, and `benchmarks` the miner's.
    `validator_hotkey` judged it last, on `validator_device` (a GPU's name, or the CPU's cores).
    """

    __tablename__ = "submissions"
    __table_args__ = (
        Index("ix_submissions_open", "is_revealed", "validated_at", "withdrawn_at", "id"),
        # Finds a hotkey's waiting submissions among any number of old ones.
        Index(
            "ix_submissions_waiting",
            *("miner_hotkey", "id"),
            postgresql_where=_WAITING,
            sqlite_where=_WAITING,
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    miner_hotkey: Mapped[str] = mapped_column(ForeignKey("miners.hotkey"), index=True)
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"), index=True)
    target_sequence_length: Mapped[int]
    signature: Mapped[str]
    ip_address: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(index=True)
    withdrawn_at: Mapped[datetime | None]

    commitment_hash: Mapped[str | None] = mapped_column(unique=True)
    commitment_version: Mapped[int | None]
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
    validator_hotkey: Mapped[str | None]
    validator_device: Mapped[str | None]
    verdict_reason: Mapped[str | None]
    measured: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    verification_passed: Mapped[bool | None]
    cosine_similarity: Mapped[float | None]
    max_abs_diff: Mapped[float | None]
    throughput_verified: Mapped[float | None]
    verification_reason: Mapped[str | None]


UNJUDGED = (Submission.validated_at.is_(None), Submission.withdrawn_at.is_(None))
"""Conditions of rows that wait, for their reveal or for a validator."""
IN_QUEUE = (Submission.is_revealed.is_(True), *UNJUDGED)
"""Conditions of rows that wait for a validator: a commitment joins the queue with its reveal."""


class IpBan(Base):
    """Failures counted against an address since its last success, and the ban they led to."""

    __tablename__ = "ip_bans"

    ip_address: Mapped[str] = mapped_column(primary_key=True)
    failure_count: Mapped[int]
    banned_until: Mapped[datetime | None]


class UsedNonce(Base):
    """A nonce of a validator's signed request, kept as long as its time would be accepted."""

    __tablename__ = "used_nonces"

    hotkey: Mapped[str] = mapped_column(primary_key=True)
    nonce: Mapped[str] = mapped_column(primary_key=True)
    expires_at: Mapped[datetime] = mapped_column(index=True)


def count(session: Session, *where: ColumnExpressionArgument[bool]) -> int:
    """Count the submissions of which every condition holds."""
    return session.scalar(select(func.count()).select_from(Submission).where(*where)) or 0
