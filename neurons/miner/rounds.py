"""Compares the server's round with a submission's; decides whether a new submission is due."""

from __future__ import annotations

from enum import Enum

from neurons.miner.cycle import VERDICTS, Submission
from neurons.wire.client import ApiClient
from neurons.wire.protocol import Round, is_same_instant


class Relation(str, Enum):
    """The server's present round, compared with a submission's round."""

    SAME = "same"
    LATER = "later"
    OTHER_DATABASE = "other database"  # the server has lost the round and its submissions


def compare_round(submission: Submission, now: Round) -> Relation:
    """Return how the server's round `now` relates to the round of the submission."""
    own = submission.round_id or 0
    if now.id > own:
        return Relation.LATER
    if now.id == own and is_same_instant(submission.round_start or "", now.start_time):
        return Relation.SAME
    return Relation.OTHER_DATABASE


def read_relation(submission: Submission, client: ApiClient) -> Relation:
    return compare_round(submission, client.current_round())


def is_due(last: Submission | None, now: Round, content_digest: str, mode: str) -> bool:
    """Return whether a new submission is due after `last`, the newest closed one.

    The same content is submitted once a round, again after an end without a verdict, and in mode
    `direct` after a premature commitment that was not revealed.
    """
    if last is None or last.state not in VERDICTS:
        return True
    if last.never_revealed and mode == "direct":
        return True
    same_round = compare_round(last, now) is Relation.SAME
    return not same_round or last.content_digest != content_digest
