"""The objects and settings of one miner, which each step receives instead of globals."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from structlog.stdlib import BoundLogger

from harness.hardware.machine import Environment
from harness.measuring.runner import CheckTree, Measure, check, measure, probe
from neurons.miner import cycle
from neurons.miner.alerts import Alerts
from neurons.miner.cycle import State, Submission
from neurons.miner.journal import Journal
from neurons.miner.publishing.fork import Fork
from neurons.miner.standing import BlockClock, Relation, Standing, compare_round, read_standing
from neurons.miner.tuner import Tuner
from neurons.miner.watcher import Watcher
from neurons.runtime.addresses import is_same_url
from neurons.runtime.errors import Held, Retry
from neurons.runtime.git.faults import HostRefused, PrivateFork
from neurons.runtime.heartbeat import MAX_SECONDS
from neurons.runtime.identity import Identity
from neurons.runtime.observe import forget_secret
from neurons.runtime.process import wait_unless
from neurons.runtime.settings import Settings
from neurons.wire.client import ApiClient
from neurons.wire.outcomes import NotRegistered, ProtocolFault, ServerFault
from neurons.wire.rules import league_of
from quasar_kernels.contract import overlay_digest

REGISTRATIONS = 2
"""How often the miner registers for one request that fails because the hotkey is unknown."""

_SHOWN: dict[State, tuple[str, ...]] = {
    State.PUBLISHED: ("fork_url", "commit_hash"),
    State.CLAIMED: ("target_sequence_length", "tokens_per_sec"),
    State.COMMITTED: ("submission_id", "reveal_block"),
    State.REVEALED: ("submission_id",),
    State.VALIDATED: ("rank", "weight", "score", "weighted_score"),
    State.RANKED: ("rank", "weight", "weighted_score"),
    State.PREMATURE: ("rank",),
    State.REJECTED: ("score",),
}
"""The attributes that the log shows when a submission reaches a state (never the salt)."""

_COMMITMENTS = (State.COMMITTING, State.COMMITTED, State.SUBMITTING)
_BAD_ENDS = (State.REJECTED, State.PREMATURE, State.UNRANKED)
PATIENCE = 20
"""Failures in a row, about an hour of them, after which the operator gets an alert."""

Reply = TypeVar("Reply")


@dataclass
class Context:
    """One miner's objects and settings."""

    settings: Settings
    identity: Identity
    journal: Journal
    client: ApiClient
    fork: Fork
    log: BoundLogger
    stop: threading.Event = field(default_factory=threading.Event)
    # measure, check, probe: the functions of `harness.measuring.runner`, or fakes
    measure: Measure = measure
    check: CheckTree = check
    probe: Callable[..., Environment] = probe
    # returns the digest of the kernels' present content
    content_digest: Callable[[], str] = overlay_digest
    # returns Unix seconds for records; waits do not depend on it
    now: Callable[[], float] = time.time
    # called by `wait`; None waits on `stop`, which ends the daemon
    waiter: Callable[[float], None] | None = None
    # returns a random number in [0, 1] for the pauses of retries
    jitter: Callable[[], float] = random.random
    # the start script with the flags that select this miner, for remedies
    script: str = "./START_MINER.sh"
    tuner: Tuner | None = None
    alerts: Alerts = field(default_factory=Alerts)
    watcher: Watcher | None = None
    published: str | None = None  # the commit that this process has created in the worktree
    # the leagues in which this process has registered
    registered: set[str] = field(default_factory=set)
    blocks: BlockClock = field(default_factory=BlockClock)
    # numbers of FAILED submissions for which this process has logged the failure
    logged_failures: set[int] = field(default_factory=set)
    quiet_seconds: float = MAX_SECONDS  # the longest interval between log lines during a step

    def wait(self, seconds: float) -> None:
        """Wait `seconds`; raise Stopped at a stop."""
        (self.waiter or partial(wait_unless, self.stop))(seconds)

    @property
    def poll_seconds(self) -> float:
        return 1.0 if self.client.on_loopback else 15.0

    @property
    def submission_mode(self) -> str:
        """The mode; `auto` is `direct` for some time after a premature commitment."""
        chosen = self.settings.submission_mode
        if chosen != "auto":
            return chosen
        known = self.journal.judges_early(self.client.base_url, self.now()) is not None
        return "direct" if known else "commit_reveal"

    @property
    def insists_on_reveal(self) -> bool:
        """Whether the settings require a reveal even of a premature commitment."""
        return self.settings.submission_mode == "commit_reveal"

    def note_early_judgement(self, submission: Submission) -> Submission:
        """Journal that a validator judged `submission` before its reveal, and log a warning."""
        now = self.now()
        self.journal.note_early_judgement(self.client.base_url, now)
        submission = self.note(submission, judged_early_at=now)
        self.log.warning(
            "this API judges commitments before their reveal",
            submission=submission.id,
            from_now_on="SUBMISSION_MODE=commit_reveal, as set; claims that are sent with auto or "
            "direct would be measured"
            if self.insists_on_reveal
            else "direct submissions",
        )
        return submission

    def suspect_early_judgement(self, submission: Submission) -> None:
        """Journal that a validator may have judged `submission` early, without measuring it."""
        self.journal.note_early_judgement(self.client.base_url, self.now())
        self.log.info(
            "a validator may have fetched the commitment before its reveal",
            submission=submission.id,
            from_now_on="SUBMISSION_MODE=commit_reveal, as set"
            if self.insists_on_reveal
            else "direct submissions for the length of a round",
        )

    def register(self, target_sequence_length: int) -> None:
        """Register in the league of the target, unless this process has already done so.

        The public server answers 500 if the hotkey is in another league; this is only logged.
        """
        league, _ = league_of(target_sequence_length)
        if league in self.registered:
            return
        try:
            reply = self.client.register(self.settings.reference_model, league)
            self.log.info("registered with the API", league=league, status=reply.status)
        except ServerFault as fault:
            self.log.warning("registration failed; continuing", league=league, reason=fault.reason)
        self.registered.add(league)

    def when_registered(self, target: int, call: Callable[[], Reply]) -> Reply:
        """Return `call()`; when the server does not know the hotkey, register and call again.

        It registers more than once, because a server may lose its database just after a
        registration.
        """
        for _ in range(REGISTRATIONS):
            try:
                return call()
            except NotRegistered:
                self.registered.discard(league_of(target)[0])
                self.register(target)
        return call()

    def reveal(self, submission: Submission) -> None:
        """Reveal in the wire version of the commitment.

        Raises ProtocolFault if the reply does not confirm the reveal of this submission.
        """
        number = int(submission.submission_id or 0)
        reply = self.client.reveal(
            number, str(submission.salt), submission.claim, submission.wire_version or 1
        )
        if reply.submission_id != number or not reply.is_revealed:
            raise ProtocolFault(
                f"/reveal_submission answered a reveal of {number} with: {reply.submission_id} is"
                f"{'' if reply.is_revealed else ' not'} revealed"
            )

    def verify_again(self, submission: Submission) -> None:
        """Check again that a validator can clone the published commit.

        After the commitment, the committed address only has to serve the commit by its hash: the
        branch may be overwritten or deleted, and the account renamed. Raises Held if the fork no
        longer contains the commit, PrivateFork if the fork is private and nothing is committed, and
        Retry if the host otherwise refuses access.
        """
        commit, url = str(submission.commit_hash), str(submission.fork_url)
        committed = submission.submission_id is not None
        try:
            if committed and self.fork.serves(url, commit):
                return
            if committed and not is_same_url(self.fork.url, url):
                self._push_to_renamed(submission)
                return
            if submission.publish_at == "before_reveal":
                self.fork.push(commit)
            self.fork.verify(commit)
        except HostRefused as refusal:
            if isinstance(refusal, PrivateFork) and submission.submission_id is None:
                raise
            raise Retry(f"{refusal.reason} {refusal.remedy}") from refusal

    def _push_to_renamed(self, submission: Submission) -> None:
        """Push to the fork's present address; raise Held if the committed one does not redirect."""
        commit, url = str(submission.commit_hash), str(submission.fork_url)
        if submission.publish_at == "before_reveal":
            self.fork.push(commit)
            if self.fork.serves(url, commit):
                return
        raise Held(
            f"The settings name the fork {self.fork.url}. The commitment names {url}, which does "
            f"not serve the commit {commit}.",
            "Set GITHUB_USERNAME, GITHUB_FORK_NAME, FORK_REMOTE and REPO_PATH to the fork of the "
            "commitment, or to the address to which it redirects, until it is revealed.",
        )

    def read_standing(self, submission: Submission) -> Standing:
        """Return the standing of `submission` by the API's public lists, or raise Retry.

        Foreign submissions are journalled and logged, because the hotkey's rank may belong to one.
        """
        standing = read_standing(submission, self.client)
        foreign = self.journal.note_foreign(
            submission.hotkey, submission.api_url, standing.others, self.now()
        )
        if foreign:
            self.log.warning(
                "the API holds submissions of this hotkey that this state folder did not send",
                submission_ids=foreign,
                remedy="run one miner for each hotkey; after the loss of a state folder, "
                f"`{self.script} restore` restores its journal",
            )
        return standing

    def update_round(self, submission: Submission) -> Submission:
        """Journal the server's new round if its database was emptied before the submission arrived.

        A queue that lists the submission shows this. Otherwise, `submission` stays unchanged.
        """
        try:
            now = self.client.current_round()
            relation = compare_round(submission, now)
            if relation is not Relation.OTHER_DATABASE or not self.read_standing(submission).queued:
                return submission
        except (Retry, Held):
            return submission
        return self.note(submission, round_id=now.id, round_start=now.start_time)

    def move(self, submission: Submission, state: State, **changes: Any) -> Submission:
        """Journal the transition of `submission` to `state` and return the result."""
        after = cycle.advance(submission, state, self.now(), **changes)
        return self.record(submission, after)

    def note(self, submission: Submission, **facts: Any) -> Submission:
        """Journal changed attributes of `submission`, in the same state; return the result."""
        return self.journal.transition(submission, replace(submission, **facts), kind="noted")

    def record(self, before: Submission, after: Submission) -> Submission:
        """Journal a change of state, log it in one line, and send an alert if it needs one."""
        self.journal.transition(before, after)
        self._alert(before, after)
        if self.watcher and after.state in _COMMITMENTS:
            self.watcher.note_commitment()
        if after.closed:
            forget_secret(after.salt or "")
            self.logged_failures.discard(after.id)
        if after.state is State.FAILED:
            self.logged_failures.add(after.id)
            self.log.warning(
                "trying again later",
                submission=after.id,
                state=before.state.value,
                attempt=after.attempts,
                seconds=round((after.retry_at or 0.0) - after.updated_at, 1),
                reason=after.reason,
            )
            return after
        shown = ("reason", "remedy", *_SHOWN.get(after.state, ()))
        values = {name: getattr(after, name) for name in shown}
        details = {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in values.items()
            if value is not None
        }
        self.log.info(f"submission {after.id} is {_named(after)}", **details)
        return after

    def _alert(self, before: Submission, after: Submission) -> None:
        """Alert the operator to a fault, and do not repeat it until the submission progresses."""
        state, text = after.state, f"submission {after.id} is {after.state.value}"
        if after.closed or before.attempts == 0:
            self.alerts.end("HELD", after.id)
        if state is State.HELD:
            self.alerts.begin("HELD", f"{text}: {after.reason} {after.remedy or ''}", after.id)
        elif state in _BAD_ENDS:
            self.alerts.send(state.value, f"{text}: {after.reason}")
        elif state is State.FAILED and after.attempts == PATIENCE:
            tries = f"has failed {PATIENCE} times in a row"
            self.alerts.send("FAILED", f"submission {after.id} {tries}: {after.reason}")


def _named(submission: Submission) -> str:
    """Return the state's name for the log, with a remark if the name alone would mislead."""
    if submission.state is State.PUBLISHED and submission.publish_at == "before_reveal":
        return "PUBLISHED only on this machine, until just before its reveal"
    return submission.state.value
