"""Data of a submission's page, which shows the claim only after the reveal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from sqlalchemy import select

from neurons.validator_api.competition import lists, ranking
from neurons.validator_api.competition.rounds import Transaction
from neurons.validator_api.database.tables import LeagueEntry, Round, Submission
from neurons.wire import rules
from neurons.wire.protocol import QueuePlace

Speeds = Sequence[tuple[int, float]]
"""Lengths in tokens with tokens/s, shortest first."""

MODELS = 3
"""Limit on the listed models of a hotkey."""


@dataclass(frozen=True)
class ClaimView:
    """A revealed submission."""

    row: Submission
    link: str | None  # the fork's address, if it is safe as a link
    models: Sequence[str]
    weighted: float
    rank: int | None
    logits: str | None
    benchmarks: Speeds  # the miner's
    measured: Speeds  # the validator's


@dataclass(frozen=True)
class SubmissionPage:
    """A submission. Only `claim` has the database row, so that nothing leaks before the reveal."""

    id: int
    hotkey: str
    created: datetime
    round_number: int
    state: str
    open: bool
    commitment: str | None
    reveal_block: int
    blocks_left: int
    claim: ClaimView | None  # None until the reveal
    queue: QueuePlace  # without a place unless it waits for a validator


def submission(t: Transaction, number: int) -> SubmissionPage | None:
    row = t.session.get(Submission, number)
    if row is None:
        return None
    block = row.reveal_block or 0
    its_round = t.session.get_one(Round, row.round_id)
    return SubmissionPage(
        id=row.id,
        hotkey=row.miner_hotkey,
        created=row.created_at,
        round_number=its_round.round_number,
        state=_state(row, t),
        open=row.validated_at is None and row.withdrawn_at is None,
        commitment=f"{row.commitment_hash:.16}..." if row.commitment_hash else None,
        reveal_block=block,
        blocks_left=max(0, block - t.block),
        claim=_claim(t, row, its_round.ranking) if row.is_revealed else None,
        queue=lists.queue_place(t, number),
    )


def _claim(t: Transaction, row: Submission, rule: rules.Ranking) -> ClaimView:
    entries = (
        select(LeagueEntry.model_name)
        .where(LeagueEntry.hotkey == row.miner_hotkey)
        .group_by(LeagueEntry.model_name)
        .order_by(LeagueEntry.model_name)
        .limit(MODELS)
    )
    claim = (row.target_sequence_length, row.tokens_per_sec)
    return ClaimView(
        row,
        link=_web_address(row.fork_url or ""),
        models=t.session.scalars(entries).all(),
        weighted=ranking.weighted(row, rule),
        rank=ranking.ranks_of(t.session, [row]).get(row.id),
        logits=_logits(row),
        # Miners repeat the claim among their benchmarks; that row would not be a measurement.
        benchmarks=[point for point in _speeds(row.benchmarks or {}) if point != claim],
        measured=_speeds(row.measured or {}),
    )


def _state(row: Submission, t: Transaction) -> str:
    if row.validated_at is not None:
        return "confirmed" if ranking.is_confirmed(row) else "rejected"
    if row.withdrawn_at is not None:
        return "replaced by a newer one, expired, or withdrawn by a ban"
    if row.is_revealed:
        return "waiting for a validator"
    if (row.reveal_block or 0) < t.oldest_block:
        return "expired"
    return "committed, hidden until its reveal"


def _logits(row: Submission) -> str | None:
    if row.verification_passed is None:
        return None
    text = "agree with the reference model" if row.verification_passed else "verification failed"
    return f"{text}: {row.verification_reason}" if row.verification_reason else text


def _speeds(figures: Mapping[str, Mapping[str, float]]) -> Speeds:
    speeds = {int(length): row.get("tokens_per_sec", 0.0) for length, row in figures.items()}
    return sorted((length, speed) for length, speed in speeds.items() if speed > 0)


def _web_address(url: str) -> str | None:
    """Return the address if it is safe as a link."""
    try:
        parts = urlsplit(url)
        safe = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in url
    except ValueError:
        return None
    return url if safe else None
