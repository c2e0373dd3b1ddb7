"""Data of a submission's page: before its reveal only the data of /pending_reveals.

The templates render only these objects, so a page cannot show fork, claim or target before the
reveal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from sqlalchemy import select
from sqlalchemy.orm import Session

from neurons.validator_api.competition import ranking
from neurons.validator_api.competition.rounds import RequestContext
from neurons.validator_api.database.tables import LeagueEntry, Round, Submission
from neurons.validator_api.pages.plot import Speeds
from neurons.wire import rules

MODELS = 3
"""Most models of a hotkey that the page lists."""


@dataclass(frozen=True)
class ClaimView:
    """The claim of a revealed submission, and its verdict."""

    fork_url: str
    link: str | None
    commit_hash: str
    models: Sequence[str]
    league: str
    multiplier: float
    target: int
    claim: float
    weighted: float
    rank: int | None
    ratio: float | None
    reason: str | None
    logits: str | None
    validator: str | None
    device: str | None
    judged: datetime | None
    timed: Speeds
    measured: Speeds


@dataclass(frozen=True)
class SubmissionPage:
    """A submission. `claim` is missing until the reveal."""

    id: int
    hotkey: str
    created: datetime
    round_number: int
    state: str
    open: bool
    commitment: str | None
    reveal_block: int | None
    blocks_left: int
    claim: ClaimView | None


def submission(session: Session, context: RequestContext, number: int) -> SubmissionPage | None:
    """Return the submission with this number, or None."""
    row = session.get(Submission, number)
    if row is None:
        return None
    hidden = not row.is_revealed
    return SubmissionPage(
        id=row.id,
        hotkey=row.miner_hotkey,
        created=row.created_at,
        round_number=session.get_one(Round, row.round_id).round_number,
        state=_state(row, context),
        open=row.validated_at is None and row.withdrawn_at is None,
        commitment=f"{row.commitment_hash:.16}..." if row.commitment_hash else None,
        reveal_block=row.reveal_block,
        blocks_left=max(0, (row.reveal_block or 0) - context.block),
        claim=None if hidden else _claim(session, row),
    )


def _claim(session: Session, row: Submission) -> ClaimView:
    speed, target = row.tokens_per_sec or 0.0, row.target_sequence_length
    league, multiplier = rules.league_of(target)
    entries = (
        select(LeagueEntry.model_name)
        .where(LeagueEntry.hotkey == row.miner_hotkey)
        .group_by(LeagueEntry.model_name)
        .order_by(LeagueEntry.model_name)
        .limit(MODELS)
    )
    return ClaimView(
        fork_url=row.fork_url or "",
        link=_web_address(row.fork_url or ""),
        commit_hash=row.commit_hash or "",
        models=session.scalars(entries).all(),
        league=league,
        multiplier=multiplier,
        target=target,
        claim=speed,
        weighted=rules.weighted_score(speed, target),
        rank=ranking.ranks_of(session, [row]).get(row.id),
        ratio=row.score,
        reason=row.verdict_reason,
        logits=_logits(row),
        validator=row.validator_hotkey,
        device=row.validator_device,
        judged=row.validated_at,
        # Miners repeat the claim among their benchmarks, which would show it as a measurement.
        timed=[point for point in _speeds(row.benchmarks or {}) if point != (target, speed)],
        measured=_speeds(row.measured or {}),
    )


def _state(row: Submission, context: RequestContext) -> str:
    if row.validated_at is not None:
        return "confirmed" if ranking.is_confirmed(row) else "rejected"
    if row.withdrawn_at is not None:
        return "replaced by a newer one, or expired"
    if row.is_revealed:
        return "waiting for a validator"
    if (row.reveal_block or 0) < context.oldest_block:
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
    """Return the address if it is safe as a link, otherwise None."""
    try:
        parts = urlsplit(url)
        safe = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in url
    except ValueError:
        return None
    return url if safe else None
