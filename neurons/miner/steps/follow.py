"""The step from REVEALED to a verdict: watches the queue, then reads rank and score."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from harness.terminal import span
from neurons.miner import cycle
from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.miner.standing import Relation, read_relation
from neurons.runtime.errors import Held, Retry
from neurons.wire.outcomes import AlreadyRevealed, NotRegistered, SubmissionNotFound, Uncertain
from neurons.wire.protocol import Performer, Weight, is_same_instant
from neurons.wire.rules import Ranking, exceeds, weighted_score

ROUND_EVERY_SECONDS = 300.0
LOG_EVERY_SECONDS = 600.0
POLLS_WITHOUT_STATUS = 40
"""Polls in a row without the submission's status (10 minutes), after which its round decides.

Deciding earlier could miss a score, above all one of 0, because of a temporary fault.
"""


@dataclass(frozen=True)
class Conclusion:
    """The end of a submission that is no longer queued, as the API shows it."""

    state: State
    rank: int | None = None
    weight: float | None = None
    score: float | None = None
    reason: str | None = None


def run(submission: Submission, context: Context) -> Submission:
    """Wait until the submission has left the validators' queue, and journal the verdict.

    If the statistics do not show the submission for some time, the verdict follows from its round
    and the weights.
    """
    logged = checked = -float("inf")
    blind = 0
    while True:
        standing = context.read_standing(submission)
        if standing.queued and submission.queued_at is None:
            if submission.salt is None:  # a crash may have prevented this in the step `submit`
                submission = context.update_round(submission)
            submission = context.note(submission, queued_at=context.now())
        if standing.performer is not None or standing.queued is False:
            return _conclude(submission, context, standing.performer)
        blind = blind + 1 if standing.queued is None else 0
        now = time.monotonic()
        if now - logged >= LOG_EVERY_SECONDS:
            logged = now
            place = _queue_place(submission, context) if standing.queued else ""
            if place != (submission.reason or ""):
                submission = context.note(submission, reason=place or None)
            context.log.info(
                "queued for a validator" if standing.queued else "queue status unknown",
                submission_id=submission.submission_id,
                queue=standing.queue_length,
                **({"place": place} if place else {}),
            )
        if now - checked >= ROUND_EVERY_SECONDS and not 0 < blind < POLLS_WITHOUT_STATUS:
            checked = now
            ended = _ended(submission, context, bool(standing.queued))
            if ended is not None:
                return ended
        context.wait(context.poll_seconds)


def _queue_place(submission: Submission, context: Context) -> str:
    """Return the place in the validators' queue as a sentence; "" if the server shows none."""
    try:
        shown = context.client.queue_place(int(submission.submission_id or 0))
    except (Retry, Held):  # the public server has no such route
        return ""
    if shown.place is None:
        return ""
    seconds = shown.estimated_seconds
    wait = "" if seconds is None else f", about {span(seconds)} at the pace of the last verdicts"
    return f"Place {shown.place} of {shown.queued} in the validators' queue by age{wait}."


def _ended(submission: Submission, context: Context, queued: bool) -> Submission | None:
    """Return the submission's end if the round or its weights show it, otherwise None."""
    relation = read_relation(submission, context.client)
    if relation is Relation.LATER and queued:
        reason = f"Round {submission.round_id} ended before a validator evaluated it."
        return context.move(submission, State.UNRANKED, reason=reason)
    if queued:
        return None
    if relation is not Relation.SAME or _place(submission, context, relation) is not None:
        return _conclude(submission, context, None)
    return None


def _conclude(submission: Submission, context: Context, row: Performer | None) -> Submission:
    relation = read_relation(submission, context.client)
    if (
        relation is Relation.OTHER_DATABASE
        and row is None
        and not _is_on_server(submission, context)
    ):
        reason = f"The server has lost it: round {submission.round_id} belongs to a new database."
        return context.record(submission, cycle.abandon(submission, reason, context.now()))
    place = _place(submission, context, relation, row)
    foreign = context.journal.foreign(submission.hotkey, submission.api_url, submission.created_at)
    conclusion = conclude(submission, row, place, foreign)
    # The public validator fetches five rows, then measures one after the other. A row that is
    # revealed in between gets a score of 0 without a measurement, and is still ranked.
    unmeasured = conclusion.state in (State.RANKED, State.REJECTED)
    if submission.mode == "commit_reveal" and unmeasured:
        context.suspect_early_judgement(submission)
    return context.move(submission, weighted_score=_score(submission, row), **vars(conclusion))


def _is_on_server(submission: Submission, context: Context) -> bool:
    """Return whether a server that counts rounds from 1 again still has the submission.

    The server answers a repeated reveal with 409 if it has the submission. This does not count
    towards a ban. A reveal does count if its number belongs to another commitment in the new
    database, so none is sent then.
    """
    if submission.salt is None:
        return False
    try:
        pending = context.client.pending_reveals().pending_reveals
        if any(row.submission_id == submission.submission_id for row in pending):
            return False  # another commitment: this one was revealed, so it is not pending
        context.reveal(submission)
    except (NotRegistered, SubmissionNotFound):
        return False
    except AlreadyRevealed:
        pass
    return True


def _place(
    submission: Submission, context: Context, relation: Relation, row: Performer | None = None
) -> tuple[int, Weight] | None:
    """Return the submission's rank and weight in its round, if the API shows them.

    The weights name hotkeys, not submissions. This hotkey's first entry belongs to its best
    submission by the round's rule, the second entry to the next, and so on.
    """
    try:
        reply = context.client.weights(int(submission.round_id or 0))
    except Uncertain:
        if relation is Relation.SAME:
            raise
        return None
    places = [(i, one) for i, one in enumerate(reply.weights, 1) if one.hotkey == submission.hotkey]
    score = _score(submission, row)
    better = sum(
        _is_ranked_before(other, submission, score, reply.ranking)
        for other in _own_in_round(submission, context)
    )
    return places[better] if better < len(places) else None


def _own_in_round(submission: Submission, context: Context) -> list[Submission]:
    """Return this hotkey's other submissions that the round may rank."""
    return [
        other
        for other in context.journal.in_round(submission.hotkey, submission.round_id)
        if is_same_instant(other.round_start or "", submission.round_start or "")
        and other.state in cycle.VERDICTS
        and other.state is not State.REJECTED  # a server that shows a score of 0 does not rank it
        and other.weighted_score is not None
    ]


def _is_ranked_before(
    other: Submission, submission: Submission, score: float, ranking: Ranking
) -> bool:
    others = float(other.weighted_score or 0.0)
    if other.id < submission.id:  # the earlier one wins a tie
        return not exceeds(score, others, ranking)
    return exceeds(others, score, ranking)


def _score(submission: Submission, row: Performer | None) -> float:
    """Return the weighted score that the row shows, or else the claim's."""
    if row is not None and row.weighted_score is not None:
        return row.weighted_score
    speed = float(submission.tokens_per_sec or 0.0)
    return weighted_score(speed, submission.target_sequence_length)


def conclude(
    submission: Submission,
    row: Performer | None,
    place: tuple[int, Weight] | None,
    foreign: Sequence[int] = (),
) -> Conclusion:
    """Return the verdict that a row of the statistics and a place among the weights show.

    `foreign` has the numbers of this hotkey's submissions that another state folder sent: the place
    may belong to one of them.
    """
    rank, weight = (place[0], place[1].weight) if place and not foreign else (None, None)
    if row is not None and row.rank:
        rank = row.rank
    if submission.judged_early_at is not None:  # its score does not come from a measurement
        return Conclusion(
            State.PREMATURE,
            rank=rank,
            weight=weight,
            reason="A validator judged it before its reveal, when there was nothing to measure. "
            "Whatever rank the API shows, nobody has measured the claim.",
        )
    if row is not None and row.score is not None and row.score <= 0:
        return Conclusion(
            State.REJECTED,
            score=row.score,
            reason="A validator scored it 0: it measured less than 90 % of the claim, could not "
            "clone or import the fork, the logits differed, or it had fetched the row before the "
            "reveal.",
        )
    if row is not None and row.score is not None:
        return Conclusion(State.VALIDATED, rank=row.rank, weight=weight, score=row.score)
    if rank is not None and submission.reveal_block is not None and submission.queued_at is None:
        return Conclusion(
            State.UNRANKED,
            reason=f"The API ranks it {rank}, but it was never seen in the queue after its reveal: "
            "it may have been judged before, when there was nothing to measure.",
        )
    if rank is not None:
        return Conclusion(
            State.RANKED,
            rank=rank,
            weight=weight,
            reason="It left the validators' queue after it was revealed, and is ranked. The API "
            "shows no score and ranks unmeasured claims too: whether it was measured is unknown.",
        )
    if place and foreign:
        return Conclusion(
            State.UNRANKED,
            reason=f"The API ranks this hotkey {place[0]}, and holds submissions of it that this "
            f"state folder did not send ({', '.join(map(str, foreign))}): the rank may "
            "belong to one of those.",
        )
    return Conclusion(
        State.UNRANKED,
        reason="The API shows neither a score nor one of the first four ranks: it may rank lower, "
        "or have a score of 0.",
    )
