"""The end of `bench`: the claim that its samples allow, its score, and its place at the API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from harness.claim import NoClaim, derive_claim
from harness.sample import Sample
from harness.terminal import counted
from neurons.miner.steps.claim import best_claim
from neurons.runtime.errors import ConfigError, Fault
from neurons.runtime.settings import Settings
from neurons.wire.client import LIST_BYTES
from neurons.wire.connection import Connection
from neurons.wire.protocol import Performer, QueuedSubmission, SubmissionStats
from neurons.wire.rules import weighted_score

REPLY_SECONDS = 10.0


def preview(samples: Sequence[Sample], settings: Settings, url: str | None) -> Iterator[str]:
    """Yield the lines; the place is left out if `url` is None or the API does not answer."""
    by_length = {
        length: [one for one in samples if one.length == length]
        for length in {one.length for one in samples}
    }
    target, headroom = settings.target_sequence_length, settings.claim_headroom
    try:
        if target == "auto":
            claim = best_claim(by_length, headroom)
        else:
            claim = derive_claim(by_length, target, headroom)
    except NoClaim as error:
        yield f"claim: none: {error}"
        return
    yield f"claim: {claim}"
    score = weighted_score(claim.tokens_per_sec, claim.target_sequence_length)
    line = f"weighted score: {score:,.1f}"
    others = listed_scores(url) if url else None
    if others is not None:
        place = 1 + sum(other > score for other in others)
        line += f", place {place} among {counted(len(others), 'claim')} that {url} lists"
    yield line


def listed_scores(url: str) -> list[float] | None:
    """Return the weighted scores of the claims that the API lists; None if it does not answer."""
    route, query = "/get_submission_stats", {"limit": 100}
    try:
        with closing(Connection(url, None, reply_seconds=REPLY_SECONDS)) as api:
            stats = api.exchange("GET", route, SubmissionStats, query=query, reply_bytes=LIST_BYTES)
    except (Fault, ConfigError):
        return None
    rows: list[QueuedSubmission | Performer] = [*stats.recent_submissions, *stats.top_performers]
    return [
        weighted_score(row.tokens_per_sec, row.target_sequence_length)
        for row in {row.id: row for row in rows}.values()
        if row.tokens_per_sec
    ]
