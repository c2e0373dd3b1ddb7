"""The state machine by itself, then under random faults and crashes with the real steps."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parts import HOTKEY, Key, Waits, make_context
from stand_in import Fault, Request, StandIn

from neurons.mining import cycle
from neurons.mining.client import ApiClient
from neurons.mining.context import Context
from neurons.mining.cycle import IllegalTransition, State, Step, Submission
from neurons.mining.daemon import run_cycle
from neurons.mining.journal import Journal
from neurons.protocol import commitment_hash

FULL: dict[str, Any] = {
    "fork_url": "u",
    "commit_hash": "a" * 40,
    "content_digest": "d",
    "report": "r",
    "tokens_per_sec": 1.0,
    "benchmarks": {},
    "salt": "s",
    "commitment_hash": "c",
    "round_id": 1,
    "submission_id": 1,
    "reveal_block": 1,
}
PATH = [
    State.PUBLISHED,
    State.MEASURED,
    State.CLAIMED,
    State.COMMITTING,
    State.COMMITTED,
    State.REVEALING,
    State.REVEALED,
    State.VALIDATED,
]


def new(**changes: Any) -> Submission:
    return Submission(1, HOTKEY, 2048, "commit_reveal", "before_commit", "u", **changes)


def test_the_whole_path_is_legal_and_each_state_has_its_step() -> None:
    submission, steps = new(), []
    for state in PATH:
        steps.append(cycle.next_step(submission))
        submission = cycle.advance(submission, state, 1.0, **FULL)
    assert steps == [
        Step.PUBLISH,
        Step.MEASURE,
        Step.CLAIM,
        Step.COMMIT,
        Step.COMMIT,
        Step.REVEAL,
        Step.REVEAL,
        Step.FOLLOW,
    ]
    assert cycle.next_step(submission) is None
    direct = replace(new(state=State.CLAIMED), mode="direct")
    assert cycle.next_step(direct) is Step.SUBMIT


@pytest.mark.parametrize(
    ("state", "to"),
    [
        (State.NEW, State.CLAIMED),
        (State.CLAIMED, State.REVEALING),
        (State.COMMITTING, State.CLAIMED),
        (State.COMMITTED, State.NEW),
        (State.COMMITTED, State.COMMITTING),
        (State.REVEALED, State.REVEALING),
        (State.VALIDATED, State.NEW),
        (State.HELD, State.REVEALED),
    ],
)
def test_arrows_that_do_not_exist_are_refused(state: State, to: State) -> None:
    with pytest.raises(IllegalTransition):
        cycle.advance(new(state=state, **FULL), to, 1.0)


@pytest.mark.parametrize("state", PATH)
def test_a_state_needs_what_it_stands_on(state: State) -> None:
    before = PATH[PATH.index(state) - 1] if state is not PATH[0] else State.NEW
    needed = cycle._REQUIRED.get(state, ())
    for name in needed:
        fields = {**FULL, name: None}
        with pytest.raises(IllegalTransition, match=name):
            cycle.advance(new(state=before, **fields), state, 1.0)


@pytest.mark.parametrize("name", cycle.FROZEN_FIELDS)
def test_a_commitment_is_frozen(name: str) -> None:
    committing = new(state=State.COMMITTING, **FULL)
    with pytest.raises(IllegalTransition, match=name):
        cycle.advance(committing, State.COMMITTED, 1.0, **{name: "other"})


def test_failures_come_back_and_are_forgotten_by_success() -> None:
    submission = new()
    for attempt in range(1, 4):
        failed = cycle.fail(submission, "reset", 100.0, 1.0)
        assert (failed.state, failed.position, failed.attempts) == (
            State.FAILED,
            State.NEW,
            attempt,
        )
        submission = cycle.resume(failed, 200.0)
        assert (submission.state, submission.reason) == (State.NEW, None)
    assert cycle.advance(submission, State.PUBLISHED, 1.0, **FULL).attempts == 0
    with pytest.raises(IllegalTransition):
        cycle.fail(failed, "again", 1.0, 0.0)


def test_held_goes_back_to_where_it_was_unless_it_is_final() -> None:
    failed = cycle.fail(new(state=State.COMMITTED, **FULL), "r", 1.0, 0.0)
    held = cycle.hold(failed, "reason", "remedy", 2.0)
    assert cycle.resume(held, 3.0).state is State.COMMITTED
    assert cycle.resume(held, 3.0).attempts == 0
    final = cycle.hold(new(), "reason", "remedy", 2.0, final=True)
    with pytest.raises(IllegalTransition):
        cycle.resume(final, 3.0)
    ended = cycle.abandon(final, "enough", 4.0)
    assert ended.closed
    with pytest.raises(IllegalTransition):
        cycle.abandon(ended, "again", 5.0)


@given(
    attempts=st.integers(1, 10_000),
    jitter=st.floats(0, 1),
    after=st.none() | st.floats(0, 1e12),
)
def test_pauses_grow_are_capped_and_honour_the_server(
    attempts: int, jitter: float, after: float | None
) -> None:
    seconds = cycle.backoff_seconds(attempts, jitter, after)
    assert 1.0 <= seconds <= cycle.RETRY_AFTER_MAX_SECONDS + 1
    assert seconds >= min(after or 0.0, cycle.RETRY_AFTER_MAX_SECONDS)
    if not after:
        assert seconds <= cycle.RETRY_MAX_SECONDS
    assert math.isfinite(seconds)


def test_the_same_content_is_due_once_a_round() -> None:
    last = new(state=State.VALIDATED, round_id=3, content_digest="d")
    assert cycle.is_due(None, 3, "d")
    assert not cycle.is_due(last, 3, "d")
    assert cycle.is_due(last, 4, "d")
    assert cycle.is_due(last, 3, "e")
    assert not cycle.is_due(replace(last, state=State.REJECTED), 3, "d")
    assert cycle.is_due(replace(last, state=State.ABANDONED), 3, "d")


@pytest.mark.parametrize("state", list(State))
def test_status_says_what_comes_next(state: State) -> None:
    submission = new(state=state, remedy="do this", retry_at=5.0, reveal_block=77)
    if state is State.FAILED:
        submission = replace(submission, resume_state=State.CLAIMED)
    said = cycle.describe(submission)
    assert said.state is state
    assert said.next_action
    assert (said.deadline == 5.0) is (state is State.FAILED)
    if state is State.HELD:
        assert said.next_action == "do this"
    if state is State.COMMITTED:
        assert "77" in said.next_action


# --- The real steps, journal and client against a server where anything can go wrong ---


class Crash(BaseException):
    """The process dies here."""


FAULTS = st.sampled_from(
    [
        None,
        Fault(stored=True),
        Fault(stored=False),
        Fault(500, "boom", stored=True),
        Fault(502, "gateway", stored=False),
        Fault(503, "busy", {"Retry-After": "1"}),
        Fault(429, "slow down"),
        Fault(425, "Cannot reveal yet. Wait 9 blocks"),
        Fault(200, b"{", stored=True),
        Fault(200, b"<html>"),
    ]
)
CRASHES = st.lists(st.sampled_from([False, False, False, True]), max_size=25)
MODES = st.sampled_from(["commit_reveal", "direct"])


class Chaos:
    """Breaks requests and kills the process around writes and requests, as drawn."""

    def __init__(self, server: StandIn, faults: list[Fault | None], crashes: list[bool]) -> None:
        self.server, self.faults, self.crashes = server, iter(faults), iter(crashes)

    def perhaps_crash(self) -> None:
        if next(self.crashes, False):
            raise Crash

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.perhaps_crash()
        path = request.url.path
        fault = next(self.faults, None)
        if fault is not None:
            self.server.faults[path].append(fault)
        headers = {key.lower(): value for key, value in request.headers.items()}
        body = json.loads(request.content) if request.content else None
        query = {key: [value] for key, value in request.url.params.items()}
        answer = self.server.handle(Request(request.method, path, query, headers, body))
        self.perhaps_crash()
        if answer.status is None:
            raise httpx.ReadError("connection reset", request=request)
        return httpx.Response(answer.status, content=answer.body, headers=answer.headers)


@contextmanager
def process(folder: Path, chaos: Chaos, mode: str) -> Iterator[Context]:
    """One life of the daemon: everything that is not on the disk is new."""
    client = ApiClient("http://127.0.0.1:1", Key(), transport=httpx.MockTransport(chaos.answer))
    context = make_context(
        folder, "http://127.0.0.1:1", client=client, waiter=Waits(), flags={"submission_mode": mode}
    )
    real = Journal.transition

    def transition(journal: Journal, *arguments: Any, **names: Any) -> Submission:
        chaos.perhaps_crash()
        result = real(journal, *arguments, **names)
        live = journal.live_submissions(HOTKEY)
        assert len(live) <= 1
        chaos.perhaps_crash()
        return result

    context.journal.transition = transition.__get__(context.journal)  # type: ignore[method-assign]
    try:
        yield context
    finally:
        context.journal.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(faults=st.lists(FAULTS, max_size=30), crashes=CRASHES, mode=MODES)
def test_a_reveal_always_matches_its_commit_and_no_two_live_ones(
    faults: list[Fault | None], crashes: list[bool], mode: str
) -> None:
    server = StandIn()
    chaos = Chaos(server, faults, crashes)
    with tempfile.TemporaryDirectory() as name:
        for _ in range(len(crashes) + 1):
            try:
                with process(Path(name), chaos, mode) as context:
                    done = run_cycle(context)
                break
            except Crash:
                continue
        else:
            raise AssertionError("the cycle never ended")
    assert done.state is State.VALIDATED
    assert server.hash_mismatches == 0
    assert len(server.rows) == 1
    if mode == "commit_reveal":
        commits = [r.body for r in server.requests if r.path == "/commit_submission"]
        assert len({body["commitment_hash"] for body in commits}) == 1
        for reveal in (r.body for r in server.requests if r.path == "/reveal_submission"):
            salted = commitment_hash(reveal["commitment_salt"], reveal["fork_url"])
            assert salted == commits[0]["commitment_hash"]
            assert reveal["tokens_per_sec"] == done.tokens_per_sec
            assert reveal["commit_hash"] == done.commit_hash
