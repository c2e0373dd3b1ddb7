"""A submission's states and transitions as pure functions: no I/O, no clock, no randomness."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from neurons.runtime.errors import Fault, HeldUntilRelease, QuasarError
from neurons.wire.outcomes import Banned, HashMismatch
from neurons.wire.protocol import WIRE_VERSION, Benchmarks, commitment

RETRY_FIRST_SECONDS = 2.0
RETRY_MAX_SECONDS = 300.0
RETRY_AFTER_MAX_SECONDS = 3600.0
"""Longest Retry-After in seconds: a mistaken date must not stop a miner for years."""

HELD_FIRST_SECONDS = 600.0
HELD_MAX_SECONDS = 6 * 3600.0

REVEAL_MAX_SECONDS = 600.0
"""Longest pause between commitment and reveal, except a ban's: the time to reveal is limited."""

NEVER = 253_402_300_799.0
"""`retry_at` of a submission that only `release` continues: the end of the year 9999."""


class IllegalTransition(QuasarError):
    """A bug: the program attempted a transition that the state machine does not have."""


class State(str, Enum):
    """A submission's state. In states that end in ING, the server may have the request."""

    NEW = "NEW"
    PUBLISHED = "PUBLISHED"
    MEASURED = "MEASURED"
    CLAIMED = "CLAIMED"
    COMMITTING = "COMMITTING"
    COMMITTED = "COMMITTED"
    SUBMITTING = "SUBMITTING"  # direct mode's single call, instead of commit and reveal
    REVEALING = "REVEALING"
    REVEALED = "REVEALED"
    VALIDATED = "VALIDATED"  # the API shows a score above 0
    RANKED = "RANKED"  # left the queue after its reveal and is ranked; the API shows no score
    REJECTED = "REJECTED"  # the API shows a score of 0
    UNRANKED = "UNRANKED"  # left the queue, and the API shows neither a rank nor a score
    PREMATURE = "PREMATURE"  # a validator judged it before its reveal, without a measurement
    ABANDONED = "ABANDONED"  # ended without a verdict; `reason` has the cause
    FAILED = "FAILED"  # the miner retries from `resume_state` at `retry_at`
    HELD = "HELD"  # like FAILED with long pauses; some faults need `release` or `abandon`


VERDICTS = frozenset(
    {State.VALIDATED, State.RANKED, State.REJECTED, State.UNRANKED, State.PREMATURE}
)
CLOSED = VERDICTS | {State.ABANDONED}
_CLAIM_FIELDS = (
    *("hotkey", "target_sequence_length", "fork_url", "commit_hash"),
    *("tokens_per_sec", "vram_mb", "benchmarks"),
)
FROZEN_FIELDS = (*_CLAIM_FIELDS, "salt", "commitment_hash")
"""Fields that cannot change after the commitment, or the direct submission, was first sent."""

BEFORE_COMMITMENT = frozenset({State.NEW, State.PUBLISHED, State.MEASURED, State.CLAIMED})
"""States in which nothing has been sent, so all fields may change."""
AWAITS_REVEAL = frozenset({State.COMMITTED, State.REVEALING})
_NEXT: dict[State, tuple[State, ...]] = {
    State.NEW: (State.PUBLISHED,),
    State.PUBLISHED: (State.MEASURED, State.NEW),
    State.MEASURED: (State.CLAIMED, State.PUBLISHED, State.NEW),
    State.CLAIMED: (State.COMMITTING, State.SUBMITTING, State.NEW),
    State.COMMITTING: (State.COMMITTED,),
    State.COMMITTED: (State.REVEALING, State.PREMATURE),
    State.SUBMITTING: (State.REVEALED, State.UNRANKED),
    # back to COMMITTED if the server rejects the reveal as too early
    State.REVEALING: (State.REVEALED, State.COMMITTED),
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


@dataclass(frozen=True)
class Submission:
    """One row of the journal. Times are Unix seconds, memory is MiB, speed is tokens/s."""

    id: int
    hotkey: str
    target_sequence_length: int
    mode: str
    publish_at: str
    api_url: str
    auto_target: bool = False
    state: State = State.NEW
    # the state to continue in after FAILED or HELD; None in HELD if the submission can only be
    # abandoned
    resume_state: State | None = None
    content_digest: str | None = None
    fork_url: str | None = None
    commit_hash: str | None = None
    report: str | None = None  # the report's path relative to the state folder
    tokens_per_sec: float | None = None
    vram_mb: float | None = None
    benchmarks: Benchmarks | None = None
    # secret until the reveal; not shown by `repr`
    salt: str | None = field(default=None, repr=False)
    commitment_hash: str | None = None
    round_id: int | None = None
    # the start of the round in the server's text, because a server with an emptied database counts
    # rounds from 1 again
    round_start: str | None = None
    # number of the round's submissions before this one was sent directly; None if this one has
    # certainly not arrived
    round_total: int | None = None
    submission_id: int | None = None
    reveal_block: int | None = None
    # time of the first poll that found it in the validators' queue; a reveal resets it to None
    queued_at: float | None = None
    # time of the poll that showed that a validator had judged it before its reveal
    judged_early_at: float | None = None
    rank: int | None = None
    weight: float | None = None
    score: float | None = None
    weighted_score: float | None = None
    reason: str | None = None
    remedy: str | None = None
    # the end of the pause in FAILED or HELD; earlier versions stored None for HELD
    retry_at: float | None = None
    attempts: int = 0  # consecutive failures in the present state; `release` resets it
    created_at: float = 0.0
    updated_at: float = 0.0

    @property
    def claim(self) -> dict[str, Any]:
        """The claim in the fields of a `ClaimRequest`, without its signature."""
        return {
            "miner_hotkey": self.hotkey,
            "fork_url": str(self.fork_url),
            "commit_hash": str(self.commit_hash),
            "tokens_per_sec": float(self.tokens_per_sec or 0.0),
            "vram_mb": self.vram_mb,
            "benchmarks": self.benchmarks,
        }

    @property
    def wire_version(self) -> int | None:
        """The wire version that gives the commitment hash; None if no version gives it."""
        bound = str(self.salt), self.target_sequence_length, self.claim
        for version in (1, WIRE_VERSION):
            if commitment(version, *bound) == self.commitment_hash:
                return version
        return None

    @property
    def closed(self) -> bool:
        return self.state in CLOSED

    @property
    def never_revealed(self) -> bool:
        """Whether a validator judged it before its reveal, and it was not revealed afterwards."""
        return self.state is State.PREMATURE and self.weighted_score is None

    @property
    def paused(self) -> bool:
        """Whether it is FAILED or HELD and the miner continues it by itself."""
        waits = self.state in (State.FAILED, State.HELD) and self.resume_state is not None
        return waits and self.retry_at != NEVER

    @property
    def position(self) -> State:
        """The present state; for FAILED and HELD, the state to resume if there is one."""
        return self.resume_state or self.state


def advance(submission: Submission, state: State, now: float, **changes: Any) -> Submission:
    """Return `submission` in `state` with `changes` and without failures.

    Raises an IllegalTransition for a missing transition or field, or a changed frozen field.
    """
    if state not in _NEXT.get(submission.state, ()):
        raise IllegalTransition(f"{submission.state.value} does not lead to {state.value}.")
    moved = _moved(submission, state, now, **{"attempts": 0, **changes})
    missing = [name for name in _REQUIRED.get(state, ()) if getattr(moved, name) is None]
    if missing:
        raise IllegalTransition(f"{state.value} needs {', '.join(missing)}.")
    if submission.state not in BEFORE_COMMITMENT:
        changed = [n for n in FROZEN_FIELDS if getattr(moved, n) != getattr(submission, n)]
        if changed:
            raise IllegalTransition(f"{', '.join(changed)} cannot change after the commitment.")
    return moved


def _moved(submission: Submission, state: State, now: float, **changes: Any) -> Submission:
    """Return `submission` in `state`; the fields of FAILED and HELD are cleared."""
    cleared = dict.fromkeys(("resume_state", "reason", "remedy", "retry_at"))
    return replace(submission, **{**cleared, **changes}, state=state, updated_at=now)


def backoff_seconds(attempts: int, jitter: float, after: float | None = None) -> float:
    """Return the seconds before the next attempt, after `attempts` failures in a row.

    A random `jitter` in [0, 1] scales the pause by 0.5 to 1. `after`, the server's Retry-After, is
    a lower bound up to a limit.
    """
    longest = min(RETRY_MAX_SECONDS, RETRY_FIRST_SECONDS * 2.0 ** min(attempts - 1, 30))
    requested = min(after or 0.0, RETRY_AFTER_MAX_SECONDS)
    return max(longest * (0.5 + 0.5 * jitter), requested + jitter)


def pause(
    submission: Submission, fault: Fault, now: float, jitter: float, holds: int = 0
) -> Submission:
    """Return `submission` as FAILED or HELD, to continue in its state after a growing pause.

    `holds` is how often it was HELD in a row in this state; its pauses grow from 10 minutes to 6
    hours. Between commitment and reveal, no pause but a ban's is longer than 10 minutes.
    """
    if submission.closed or submission.state in (State.HELD, State.FAILED):
        raise IllegalTransition(f"{submission.state.value} cannot be paused.")
    attempts, held_after = submission.attempts + 1, fault.held_after
    held = held_after is not None and attempts > held_after
    if held:
        seconds = min(HELD_MAX_SECONDS, HELD_FIRST_SECONDS * 2.0 ** min(holds, 30))
    else:
        seconds = backoff_seconds(attempts, jitter, fault.after)
    if submission.state in AWAITS_REVEAL and not isinstance(fault, Banned):
        seconds = min(seconds, REVEAL_MAX_SECONDS)
    return _moved(
        submission,
        State.HELD if held else State.FAILED,
        now,
        resume_state=None if isinstance(fault, HashMismatch) else submission.state,
        reason=fault.reason,
        remedy=fault.remedy or None,
        attempts=attempts,
        retry_at=NEVER if isinstance(fault, HeldUntilRelease) else now + seconds,
    )


def may_continue(paused: Submission, now: float) -> bool:
    """Return whether the pause of a FAILED or HELD submission has ended.

    It has also ended if the clock was turned back since: otherwise, it could last for years.
    """
    return paused.paused and not paused.updated_at <= now < (paused.retry_at or 0.0)


def resume(submission: Submission, now: float, *, reset: bool = False) -> Submission:
    """Return a FAILED or HELD `submission` in its `resume_state`; `reset` forgets its failures.

    Raises an IllegalTransition if it has no state to resume.
    """
    if submission.state not in (State.FAILED, State.HELD) or submission.resume_state is None:
        raise IllegalTransition(f"{submission.state.value} has no state to resume.")
    attempts = 0 if reset else submission.attempts
    return _moved(submission, submission.resume_state, now, attempts=attempts)


def abandon(submission: Submission, reason: str, now: float) -> Submission:
    """Return `submission` as ABANDONED, which is an end without a verdict."""
    if submission.closed:
        raise IllegalTransition(f"{submission.state.value} is already final.")
    return _moved(submission, State.ABANDONED, now, reason=reason)


def direct_draft(premature: Submission, now: float) -> Submission:
    """Return the draft of a direct submission with the claim and measurements of `premature`."""
    sources = ("publish_at", "api_url", "auto_target", "content_digest", "report")
    return Submission(
        id=0,
        mode="direct",
        state=State.CLAIMED,
        created_at=now,
        updated_at=now,
        **{name: getattr(premature, name) for name in (*_CLAIM_FIELDS, *sources)},
    )
