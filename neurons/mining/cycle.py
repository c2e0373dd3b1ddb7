"""The life of a submission as a pure state machine: no I/O, no clock, no randomness of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from neurons.errors import QuasarError
from neurons.protocol import Benchmarks

RETRY_FIRST_SECONDS = 2.0
RETRY_MAX_SECONDS = 300.0
RETRY_AFTER_MAX_SECONDS = 3600.0
"""How far a server's Retry-After is honoured: a mistaken date must not stop a miner for years."""


class IllegalTransition(QuasarError):
    """The program tried to move a submission where the machine does not go: a bug."""


class State(str, Enum):
    """Where a submission stands. A name that ends in ING is an act that may have happened."""

    NEW = "NEW"
    PUBLISHED = "PUBLISHED"
    MEASURED = "MEASURED"
    CLAIMED = "CLAIMED"
    COMMITTING = "COMMITTING"
    COMMITTED = "COMMITTED"
    SUBMITTING = "SUBMITTING"  # direct mode's one call, in place of the commit and the reveal
    REVEALING = "REVEALING"
    REVEALED = "REVEALED"
    VALIDATED = "VALIDATED"  # the API shows a score above 0
    RANKED = "RANKED"  # judged after it was revealed, and ranked; the API shows no score
    REJECTED = "REJECTED"  # the API shows a score of 0
    UNRANKED = "UNRANKED"  # no longer queued, and the API shows neither a rank nor a score
    PREMATURE = "PREMATURE"  # judged before its reveal, so that nobody measured it
    ABANDONED = "ABANDONED"  # ended without a verdict; `reason` says why
    FAILED = "FAILED"  # comes back by itself to `resume_state` at `retry_at`
    HELD = "HELD"  # waits for a person


class Step(str, Enum):
    """What the daemon does next; each but RESUME is one module of `neurons.mining.steps`."""

    PUBLISH = "publish"
    MEASURE = "measure"
    CLAIM = "claim"
    COMMIT = "commit"
    SUBMIT = "submit"
    REVEAL = "reveal"
    FOLLOW = "follow"
    RESUME = "resume"


VERDICTS = frozenset(
    {State.VALIDATED, State.RANKED, State.REJECTED, State.UNRANKED, State.PREMATURE}
)
CLOSED = VERDICTS | {State.ABANDONED}
FROZEN_FIELDS = (
    "hotkey",
    "target_sequence_length",
    "fork_url",
    "commit_hash",
    "tokens_per_sec",
    "vram_mb",
    "benchmarks",
    "salt",
    "commitment_hash",
)
"""What a commitment stands for: unchanged from the moment before it is sent to the verdict."""

_UNFROZEN = (State.NEW, State.PUBLISHED, State.MEASURED, State.CLAIMED)
_NEXT: dict[State, tuple[State, ...]] = {
    State.NEW: (State.PUBLISHED,),
    State.PUBLISHED: (State.MEASURED, State.NEW),
    State.MEASURED: (State.CLAIMED, State.PUBLISHED, State.NEW),
    State.CLAIMED: (State.COMMITTING, State.SUBMITTING, State.NEW),
    State.COMMITTING: (State.COMMITTED,),
    State.COMMITTED: (State.REVEALING, State.PREMATURE),
    State.SUBMITTING: (State.REVEALED, State.UNRANKED),
    State.REVEALING: (State.REVEALED, State.COMMITTED),  # back when the server says: too early
    State.REVEALED: tuple(VERDICTS),
}
_REQUIRED: dict[State, tuple[str, ...]] = {
    State.PUBLISHED: ("fork_url", "commit_hash", "content_digest"),
    State.MEASURED: ("report",),
    State.CLAIMED: ("tokens_per_sec", "benchmarks"),
    State.COMMITTING: ("salt", "commitment_hash", "round_id"),
    State.COMMITTED: ("submission_id", "reveal_block"),
    State.SUBMITTING: ("round_id",),
    State.REVEALED: ("submission_id",),
}
_STEPS: dict[State, Step] = {
    State.NEW: Step.PUBLISH,
    State.PUBLISHED: Step.MEASURE,
    State.MEASURED: Step.CLAIM,
    State.COMMITTING: Step.COMMIT,
    State.COMMITTED: Step.REVEAL,
    State.SUBMITTING: Step.SUBMIT,
    State.REVEALING: Step.REVEAL,
    State.REVEALED: Step.FOLLOW,
    State.FAILED: Step.RESUME,
}


@dataclass(frozen=True)
class Submission:
    """One row of the journal. Times are Unix seconds, memory is MiB, speed is tokens/s.

    Attributes:
        resume_state: where FAILED goes back to, or HELD once a person acted (None: it cannot).
        attempts: failures in a row of the present state.
        salt: secret until the reveal; kept out of `repr`.
        round_start: the server's words for when the round began: a server whose database was
            emptied counts its rounds from 1 again.
        round_total: how many submissions the round held before a direct one was sent; None when
            it certainly did not arrive.
        queued_at: when it was seen in the validators' queue: the commitment until its reveal, from
            then on what was revealed.
        judged_early_at: when it was seen to have left that queue, before its reveal.
        report: the report's path relative to the state folder.
    """

    id: int
    hotkey: str
    target_sequence_length: int
    mode: str
    publish_at: str
    api_url: str
    auto_target: bool = False
    state: State = State.NEW
    resume_state: State | None = None
    content_digest: str | None = None
    fork_url: str | None = None
    commit_hash: str | None = None
    report: str | None = None
    tokens_per_sec: float | None = None
    vram_mb: float | None = None
    benchmarks: Benchmarks | None = None
    salt: str | None = field(default=None, repr=False)
    commitment_hash: str | None = None
    round_id: int | None = None
    round_start: str | None = None
    round_total: int | None = None
    submission_id: int | None = None
    reveal_block: int | None = None
    queued_at: float | None = None
    judged_early_at: float | None = None
    rank: int | None = None
    weight: float | None = None
    score: float | None = None
    weighted_score: float | None = None
    reason: str | None = None
    remedy: str | None = None
    retry_at: float | None = None
    attempts: int = 0
    created_at: float = 0.0
    updated_at: float = 0.0

    @property
    def closed(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.state in CLOSED

    @property
    def never_revealed(self) -> bool:
        """Whether it was judged before its reveal and ended there, so that nothing is ranked."""
        return self.state is State.PREMATURE and self.weighted_score is None

    @property
    def position(self) -> State:
        """The state it is in, or will come back to."""
        return self.resume_state or self.state


@dataclass(frozen=True)
class Description:
    """What `status` shows: the state, when it ends by itself (Unix seconds), what comes next."""

    state: State
    deadline: float | None
    next_action: str


def next_step(submission: Submission) -> Step | None:
    """Return what to do now; None when it is closed or waits for a person."""
    if submission.state is State.CLAIMED:
        return Step.SUBMIT if submission.mode == "direct" else Step.COMMIT
    return _STEPS.get(submission.state)


def advance(submission: Submission, state: State, now: float, **changes: Any) -> Submission:
    """Return `submission` moved to `state` with `changes`, its failures forgotten.

    Raises:
        IllegalTransition: the machine has no such arrow, a field that the state stands on is
            missing, or a frozen field would change.
    """
    if state not in _NEXT.get(submission.state, ()):
        raise IllegalTransition(f"{submission.state.value} does not lead to {state.value}.")
    moved = replace(
        submission,
        **{"reason": None, "remedy": None, **changes},
        state=state,
        resume_state=None,
        retry_at=None,
        attempts=0,
        updated_at=now,
    )
    missing = [name for name in _REQUIRED.get(state, ()) if getattr(moved, name) is None]
    if missing:
        raise IllegalTransition(f"{state.value} needs {', '.join(missing)}.")
    if submission.state not in _UNFROZEN:
        changed = [n for n in FROZEN_FIELDS if getattr(moved, n) != getattr(submission, n)]
        if changed:
            raise IllegalTransition(f"{', '.join(changed)} cannot change after the commitment.")
    return moved


def backoff_seconds(attempts: int, jitter: float, after: float | None = None) -> float:
    """Return the pause before the next try.

    Args:
        attempts: failures in a row, from 1.
        jitter: a number in [0, 1] that spreads miners out; the pause is scaled by 0.5 to 1.
        after: seconds that the other side asked for; a lower bound, itself capped.
    """
    ceiling = min(RETRY_MAX_SECONDS, RETRY_FIRST_SECONDS * 2.0 ** min(attempts - 1, 30))
    asked = min(after or 0.0, RETRY_AFTER_MAX_SECONDS)
    return max(ceiling * (0.5 + 0.5 * jitter), asked + jitter)


def fail(
    submission: Submission, reason: str, now: float, jitter: float, after: float | None = None
) -> Submission:
    """Return `submission` as FAILED: it comes back to its state after a growing pause."""
    if submission.closed or submission.state in (State.HELD, State.FAILED):
        raise IllegalTransition(f"{submission.state.value} cannot fail.")
    attempts = submission.attempts + 1
    return replace(
        submission,
        state=State.FAILED,
        resume_state=submission.state,
        reason=reason,
        remedy=None,
        attempts=attempts,
        retry_at=now + backoff_seconds(attempts, jitter, after),
        updated_at=now,
    )


def hold(
    submission: Submission, reason: str, remedy: str, now: float, *, final: bool = False
) -> Submission:
    """Return `submission` as HELD; when `final` it can be abandoned but never go on."""
    if submission.closed or submission.state is State.HELD:
        raise IllegalTransition(f"{submission.state.value} cannot be held.")
    return replace(
        submission,
        state=State.HELD,
        resume_state=None if final else submission.position,
        reason=reason,
        remedy=remedy,
        retry_at=None,
        updated_at=now,
    )


def resume(submission: Submission, now: float) -> Submission:
    """Return a FAILED or a HELD `submission` in the state that it left.

    A person's act starts the count of failures anew; a pause that ran out does not.
    """
    if submission.state not in (State.FAILED, State.HELD) or submission.resume_state is None:
        raise IllegalTransition(f"{submission.state.value} has no state to go back to.")
    return replace(
        submission,
        state=submission.resume_state,
        resume_state=None,
        reason=None,
        remedy=None,
        retry_at=None,
        attempts=0 if submission.state is State.HELD else submission.attempts,
        updated_at=now,
    )


def abandon(submission: Submission, reason: str, now: float) -> Submission:
    """Return `submission` ended without a verdict."""
    if submission.closed:
        raise IllegalTransition(f"{submission.state.value} is an end already.")
    return replace(
        submission,
        state=State.ABANDONED,
        resume_state=None,
        reason=reason,
        remedy=None,
        retry_at=None,
        updated_at=now,
    )


def directly(premature: Submission, now: float) -> Submission:
    """Return the draft of a direct submission of what `premature` had claimed.

    The measurements stand: nothing changed but the way in which the claim is sent.
    """
    taken_over = (
        "hotkey",
        "target_sequence_length",
        "publish_at",
        "api_url",
        "auto_target",
        "content_digest",
        "fork_url",
        "commit_hash",
        "report",
        "tokens_per_sec",
        "vram_mb",
        "benchmarks",
    )
    return Submission(
        id=0,
        mode="direct",
        state=State.CLAIMED,
        created_at=now,
        updated_at=now,
        **{name: getattr(premature, name) for name in taken_over},
    )


class RoundNow(str, Enum):
    """How the server's present round stands to a submission's own."""

    SAME = "same"
    LATER = "later"
    OTHER_DATABASE = "other database"  # the server forgot the round, and the submission with it


def compare_round(submission: Submission, round_id: int, round_start: str) -> RoundNow:
    """Tell whether the round that the server names is the one that was submitted to."""
    own = submission.round_id or 0
    if round_id > own:
        return RoundNow.LATER
    if round_id == own and submission.round_start in (None, round_start):
        return RoundNow.SAME
    return RoundNow.OTHER_DATABASE


def is_due(
    last: Submission | None, round_id: int, round_start: str, content_digest: str, mode: str
) -> bool:
    """Tell whether a new submission is worth making after `last`, the newest closed one.

    The same content is submitted once a round; after a submission that ended without a verdict
    there is nothing to repeat, so it is due as well. One that was judged before its reveal, and
    so was never revealed, is worth a direct submission.
    """
    if last is None or last.state not in VERDICTS:
        return True
    if last.never_revealed and mode == "direct":
        return True
    same_round = compare_round(last, round_id, round_start) is RoundNow.SAME
    return not same_round or last.content_digest != content_digest


_NEXT_ACTION = {
    State.NEW: "publish the kernels to the fork",
    State.PUBLISHED: "measure the fork's commit",
    State.MEASURED: "derive the claim",
    State.COMMITTING: "look the commitment up on the server, send it if it is not there",
    State.COMMITTED: "reveal when the server reaches the reveal block",
    State.SUBMITTING: "look the submission up on the server, send it if it is not there",
    State.REVEALING: "look the reveal up on the server, send it if it is not there",
    State.REVEALED: "wait for a validator's verdict",
}


def describe(submission: Submission, now: float) -> Description:
    """Return what `status` says about `submission` at `now`, in Unix seconds.

    A pause never lasts longer than the longest one, also when the clock was set back meanwhile.
    """
    state = submission.state
    deadline = None
    if state is State.HELD:
        action = submission.remedy or "act on the reason"
    elif state is State.FAILED:
        deadline = min(submission.retry_at or now, now + RETRY_AFTER_MAX_SECONDS)
        action = f"try again: {_NEXT_ACTION.get(submission.position, 'submit the claim')}"
    elif state is State.CLAIMED:
        action = "submit the claim" if submission.mode == "direct" else "commit to the claim"
    elif state is State.NEW and submission.publish_at == "before_reveal":
        action = "commit the kernels on this machine; they become public just before the reveal"
    elif state is State.COMMITTED:
        action = f"reveal when the server reaches block {submission.reveal_block}"
    else:
        action = _NEXT_ACTION.get(state, "none: a new cycle starts with a round or a change")
    return Description(state, deadline, action)
