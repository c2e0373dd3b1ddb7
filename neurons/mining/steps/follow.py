"""REVEALED to its verdict: watches the queue, then reads rank and score off what is public."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from neurons.mining.context import Context
from neurons.mining.cycle import State, Submission
from neurons.mining.outcomes import Refused
from neurons.protocol import Performer, SubmissionStats, Weight, weighted_score

STATS_ROWS = 100
"""This project's own server lists no more."""
STATS_ROWS_MAX = 800
"""With benchmarks in each row, as many as fit the client's limit on a reply."""
ROUND_EVERY_SECONDS = 300.0
LOG_EVERY_SECONDS = 600.0


@dataclass(frozen=True)
class Verdict:
    """What the API shows of a submission that is no longer queued."""

    state: State
    rank: int | None = None
    weight: float | None = None
    score: float | None = None
    reason: str | None = None


def run(submission: Submission, context: Context) -> Submission:
    """Wait until a validator has taken the submission off the queue, and journal what is known."""
    logged = asked_round = -float("inf")
    while True:
        stats, queued = _look(submission, context)
        if not queued:
            return _conclude(submission, context, stats)
        now = time.monotonic()
        if now - logged >= LOG_EVERY_SECONDS:
            logged = now
            context.log.info(
                "queued for a validator",
                submission_id=submission.submission_id,
                queue=len(stats.recent_submissions),
            )
        if now - asked_round >= ROUND_EVERY_SECONDS:
            asked_round = now
            if context.client.current_round().id != submission.round_id:
                return context.move(
                    submission,
                    State.UNRANKED,
                    reason=f"Round {submission.round_id} ended before a validator looked at it.",
                )
        context.wait(context.poll_seconds)


def _look(submission: Submission, context: Context) -> tuple[SubmissionStats, bool]:
    """Return the public statistics, and whether the submission is in the queue.

    The list is newest first and cut off: a full list that ends before ours proves nothing.
    """
    stats, rows = context.client.stats(STATS_ROWS), STATS_ROWS
    while True:
        listed = [row.id for row in stats.recent_submissions if not row.validated]
        if submission.submission_id in listed:
            return stats, True
        cut_off = len(stats.recent_submissions) >= rows
        if not cut_off or min(listed, default=0) < int(submission.submission_id or 0):
            return stats, False
        if rows >= STATS_ROWS_MAX or _performer(submission, stats):
            return stats, _performer(submission, stats) is None
        rows *= 2
        try:
            stats = context.client.stats(rows)
        except Refused:  # it lists no more than that
            return stats, True


def _conclude(submission: Submission, context: Context, stats: SubmissionStats) -> Submission:
    weights = context.client.weights(int(submission.round_id or 0)).weights
    verdict = judge(submission, _performer(submission, stats), weights)
    score = weighted_score(
        float(submission.tokens_per_sec or 0.0), submission.target_sequence_length
    )
    return context.move(
        submission,
        verdict.state,
        rank=verdict.rank,
        weight=verdict.weight,
        score=verdict.score,
        weighted_score=score,
        reason=verdict.reason,
    )


def _performer(submission: Submission, stats: SubmissionStats) -> Performer | None:
    """Return the row of `top_performers` that shows a verdict on this submission.

    The public server lists the fastest claims there, judged or not: such a row says nothing.
    """
    for row in stats.top_performers:
        if row.id == submission.submission_id and (row.rank or row.score is not None):
            return row
    return None


def judge(submission: Submission, row: Performer | None, weights: Sequence[Weight]) -> Verdict:
    """Return the verdict that a row of the statistics and the round's weights, best first, show."""
    places = [index for index, weight in enumerate(weights) if weight.hotkey == submission.hotkey]
    place = places[0] if places else None
    if row is not None and row.score is not None and row.score <= 0:
        return Verdict(
            State.REJECTED,
            score=row.score,
            reason="A validator scored it 0: it measured less than 90 % of the claim, could not "
            "clone or import the fork, or the logits differed.",
        )
    weight = weights[place].weight if place is not None else None
    if row is not None:
        return Verdict(State.VALIDATED, rank=row.rank, weight=weight, score=row.score)
    if place is not None:
        return Verdict(State.VALIDATED, rank=place + 1, weight=weight)
    return Verdict(
        State.UNRANKED,
        reason="A validator has taken it off the queue. The API shows neither a score nor one of "
        "the first four ranks: it may rank lower, or have scored 0.",
    )
