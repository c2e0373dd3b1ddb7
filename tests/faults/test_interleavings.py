"""The real state machine, journal and client under random faults, crashes and emptied databases."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from neurons.miner import daemon
from neurons.miner.context import Context
from neurons.miner.cycle import (
    AWAITS_REVEAL,
    HELD_MAX_SECONDS,
    REVEAL_MAX_SECONDS,
    VERDICTS,
    State,
    Submission,
)
from neurons.miner.daemon import run_cycle
from neurons.miner.journal import Journal
from neurons.runtime.git.faults import HostRefused
from neurons.wire.client import ApiClient
from neurons.wire.protocol import commitment_hash
from tests.harness import samples
from tests.neurons.fake_validator_api import LOST, REVEAL, FakeValidatorApi, Fault, respond
from tests.neurons.miner.parts import HOTKEY, FakeBench, FakeFork, Key, Waits, make_context

WIDE = samples.environment(cpu_count=8)
"""A machine that starts all processes of a claim at once."""

NGINX = b"<html><head><title>404 Not Found</title></head></html>"
FAULTS = st.sampled_from(
    [
        Fault(stored=True),
        Fault(stored=False),
        Fault(500, "boom", stored=True),
        Fault(502, "gateway", stored=False),
        Fault(503, "busy", {"Retry-After": "1"}),
        Fault(429, "slow down"),
        Fault(425, "Cannot reveal yet. Wait 9 blocks"),
        Fault(403, "IP address banned: IP banned for 0.1 more hours"),
        Fault(401, "Authentication error: database is locked"),
        Fault(400, "There was an error parsing the body"),
        # these hold a submission, which the miner continues by itself
        Fault(401, "Invalid signature"),
        Fault(403, "This hotkey may not do this"),
        Fault(404, "Submission not found"),
        Fault(422, b'{"detail": [{"loc": ["body"], "msg": "Field required"}]}'),
        Fault(404, NGINX),
        Fault(404, NGINX, stored=True),
        Fault(405, b"<html>"),
        Fault(302, b"", {"Location": "https://elsewhere.example/"}),
        Fault(200, b"{", stored=True),
        Fault(200, b"<html>"),
    ]
)
# Either many faults from the start on, or a few of them spread over the whole run.
BROKEN: st.SearchStrategy[dict[int, Fault]] = st.lists(st.none() | FAULTS, max_size=30).map(
    lambda drawn: {number: fault for number, fault in enumerate(drawn, 1) if fault}
) | st.dictionaries(st.integers(1, 80), FAULTS, max_size=12)
CRASHES = st.sets(st.integers(1, 30), max_size=8) | st.sets(st.integers(1, 250), max_size=8)
# Between two wipes, the miner has time to register again.
WIPES: st.SearchStrategy[set[int]] = st.just(set()) | st.builds(
    lambda first, gap: {first, first + gap}, st.integers(1, 40), st.integers(10, 60)
)
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder in memory, because thousands of synchronous journals would wait for a disk."""


class Crash(BaseException):
    """The process dies here."""


@dataclass
class Scenario:
    """The faults of one run, and the server's behaviour."""

    faults: dict[int, Fault] = field(default_factory=dict)  # by the number of the request
    # Numbers of moments at which the process dies. There is a moment before and after each request
    # and each transition.
    crashes: set[int] = field(default_factory=set)
    # numbers of requests before which the database is emptied, or another hotkey submits
    wipes: set[int] = field(default_factory=set)
    foreign: set[int] = field(default_factory=set)
    refusals: set[int] = field(default_factory=set)  # numbers of the fork's checks that fail
    # The server processes reveals and never answers them. This has no effect together with wipes,
    # because only a reply can show the loss of a database.
    silent_reveal: bool = False
    fetches_ahead: bool = False
    judges_early: bool = False
    shows_scores: bool = False
    mode: str = "auto"


SCENARIOS = st.builds(
    Scenario,
    faults=BROKEN,
    crashes=CRASHES,
    wipes=WIPES,
    foreign=st.sets(st.integers(1, 60), max_size=6),
    refusals=st.sets(st.integers(2, 12), max_size=8),  # the check before the commitment succeeds
    silent_reveal=st.booleans(),
    fetches_ahead=st.booleans(),
    judges_early=st.booleans(),
    shows_scores=st.booleans(),
    mode=st.sampled_from(["auto", "commit_reveal", "direct"]),
)


class Chaos:
    """Breaks requests, empties the database and kills the process according to a scenario."""

    def __init__(self, server: FakeValidatorApi, scenario: Scenario) -> None:
        self.server, self.scenario = server, scenario
        self.requests = self.moments = self.checks = 0
        self.lost: list[list[dict[str, Any]]] = []  # the rows of emptied databases

    def perhaps_crash(self) -> None:
        self.moments += 1
        if self.moments in self.scenario.crashes:
            raise Crash

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.perhaps_crash()
        self.requests += 1
        scenario = self.scenario
        if self.requests in scenario.wipes:
            self.lost.append(self.server.rows)
            self.server.wipe()
        if self.requests in scenario.foreign:
            self.server.add_foreign(revealed=False)
        path = request.url.path
        fault = scenario.faults.get(self.requests)
        if fault is None and path == REVEAL and scenario.silent_reveal and not scenario.wipes:
            fault = LOST
        if fault is not None:
            self.server.faults[path].append(fault)
        try:
            return respond(self.server, request)
        finally:
            self.perhaps_crash()


class RefusingFork(FakeFork):
    """A fork whose host refuses access at the checks that `Scenario.refusals` lists."""

    chaos: Chaos

    def verify(self, commit: str) -> None:
        self.chaos.checks += 1
        if self.chaos.checks in self.chaos.scenario.refusals and any(
            row["miner_hotkey"] == HOTKEY for row in self.chaos.server.rows
        ):
            raise HostRefused("The remote refused the credentials.", "Check GITHUB_TOKEN.")
        super().verify(commit)


class Clock:
    """Unix seconds of the miner and the server, advanced by waits."""

    def __init__(self) -> None:
        self.seconds = 1e9

    def __call__(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds


@contextmanager
def process(folder: Path, chaos: Chaos, clock: Clock) -> Iterator[Context]:
    """Yield a newly started daemon, which shares only the disk with earlier ones."""
    client = ApiClient("http://127.0.0.1:1", Key(), transport=httpx.MockTransport(chaos.answer))
    fork = RefusingFork(folder / "fork")
    fork.chaos = chaos
    context = make_context(
        folder,
        "http://127.0.0.1:1",
        client=client,
        fork=fork,
        waiter=Waits(clock.wait),
        now=clock,
        submission_mode=chaos.scenario.mode,
        measure=FakeBench(environment=WIDE),
        probe=lambda *_: WIDE,
    )
    real = Journal.transition

    def transition(journal: Journal, *arguments: Any, **names: Any) -> Submission:
        chaos.perhaps_crash()
        result = real(journal, *arguments, **names)
        live = journal.live_submissions(HOTKEY)
        assert len(live) <= 1
        if result.state is State.ABANDONED:
            held = [row["commitment_hash"] for row in chaos.server.rows]
            assert result.commitment_hash not in held, "abandoned, but the server holds it"
        chaos.perhaps_crash()
        return result

    context.journal.transition = transition.__get__(context.journal)  # type: ignore[method-assign]
    try:
        yield context
    finally:
        context.journal.close()


def lives(folder: Path, chaos: Chaos, clock: Clock) -> list[Submission]:
    """Restart the miner until a submission has its verdict; return all, oldest first."""
    begun: os.stat_result | None = None
    for _ in range(100):
        try:
            with process(folder, chaos, clock) as context:
                journal = context.journal.path.stat()
                assert os.path.samestat(begun or journal, journal), "the journal was replaced"
                begun = journal
                if not has_verdict(context, chaos.scenario.mode):
                    wait_while_held(run_cycle(context), context, clock)
                if context.journal.latest()[0].state is not State.ABANDONED:
                    return context.journal.latest(100)[::-1]
        except Crash:
            continue
    raise AssertionError("the cycle never ended")


def wait_while_held(submission: Submission, context: Context, clock: Clock) -> None:
    """Run cycles whenever a HELD submission's pause ends, as the daemon does between cycles."""
    for _ in range(60):
        if submission.state is not State.HELD:
            return
        assert submission.paused, f"{submission.reason} would wait for a person"
        seconds = float(submission.retry_at or 0.0) - clock()
        most = REVEAL_MAX_SECONDS if submission.position in AWAITS_REVEAL else HELD_MAX_SECONDS
        assert 0 < seconds <= most, (submission.position, seconds)
        clock.wait(seconds / 2)
        assert daemon._run_cycle(context).state is State.HELD  # not before its time
        clock.wait(seconds / 2 + 1.0)
        submission = daemon._run_cycle(context)
    raise AssertionError(f"it is HELD for ever: {submission.reason}")


def has_verdict(context: Context, mode: str) -> bool:
    """Return whether a miner that starts now has nothing to do in this round."""
    last = next(iter(context.journal.latest()), None)
    resubmits = mode == "auto" and last is not None and last.never_revealed
    return last is not None and last.state in VERDICTS and not resubmits


@pytest.fixture(autouse=True, scope="module")
def _without_heartbeats() -> Iterator[None]:
    """Do not start a heartbeat's thread for each of ten thousand short steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemon, "heartbeat", lambda *_, **__: nullcontext())
        yield


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(
    max_examples=10_000 if os.environ.get("QUASAR_NIGHTLY") else 60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(scenario=SCENARIOS)
@example(  # an emptied database, and crashes before the submission's round is journalled again
    Scenario(
        crashes={23, 25, 26, 29},
        wipes={3, 49},
        foreign={11, 13, 14, 56, 59},
        fetches_ahead=True,
        judges_early=True,
        mode="direct",
    )
)
@example(  # no reveal is answered, but a validator measures after the first one
    Scenario(
        faults={
            **dict.fromkeys((1, 2), LOST),
            5: Fault(503, "busy", {"Retry-After": "1"}),
            15: Fault(404, NGINX),
            18: Fault(405, b"<html>"),
            20: Fault(429, "slow down"),
        },
        silent_reveal=True,
    )
)
# no reveal is answered, and nothing else is wrong: the submission is seen in the queue
@example(Scenario(silent_reveal=True, fetches_ahead=True, mode="commit_reveal"))
def test_row_02_no_duplicate_no_loss_and_no_false_verdict(scenario: Scenario) -> None:
    mode, shows_scores = scenario.mode, scenario.shows_scores
    clock, server = Clock(), FakeValidatorApi()
    server.clock, server.judging_seconds = clock, 6.0
    server.judges_early, server.shows_scores = scenario.judges_early, shows_scores
    server.fetches_ahead = scenario.fetches_ahead
    chaos = Chaos(server, scenario)
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        submissions = lives(Path(name), chaos, clock)
    done = submissions[-1]
    databases = [
        [row for row in rows if row["miner_hotkey"] == HOTKEY]
        for rows in (server.rows, *chaos.lost)
    ]

    # Each database has at most one committed and one direct row.
    for rows in databases:
        committed = [row for row in rows if row["reveal_block"]]
        assert len(committed) <= 1
        assert len(rows) - len(committed) <= 1
        assert len(rows) < 2 or mode == "auto"
    assert server.hash_mismatches == 0
    check_reveals(server, submissions)

    # The miner's verdict agrees with the server's.
    judged = [row for rows in databases for row in rows if row["validated"] and is_of(row, done)]
    if done.state is State.PREMATURE:
        assert any(row["judged_early"] for row in judged)
    elif done.state is State.UNRANKED:
        disturbed = scenario.wipes or scenario.faults or scenario.crashes
        assert disturbed or mode != "commit_reveal" or scenario.judges_early
    elif done.state is State.REJECTED:
        assert any(row["judged_early"] for row in judged)
        assert (shows_scores, scenario.fetches_ahead, done.score) == (True, True, 0.0)
        assert "fetched the row before" in str(done.reason)
    elif done.state is State.RANKED:
        assert judged
        assert not shows_scores
        assert "whether it was measured is unknown" in str(done.reason)
    else:
        assert any(not row["judged_early"] for row in judged)
        assert (done.state, shows_scores) == (State.VALIDATED, True)
    for submission in submissions:
        assert submission.state in (State.ABANDONED, State.PREMATURE) or submission is done


def is_of(row: dict[str, Any], submission: Submission) -> bool:
    """Return whether a row of the server is the submission's."""
    sent = row["commitment_hash"] == (submission.commitment_hash or "")
    return sent and row["id"] == submission.submission_id


def check_reveals(server: FakeValidatorApi, submissions: list[Submission]) -> None:
    """Check that each reveal matches its commitment and the journal."""
    by_salt = {submission.salt: submission for submission in submissions}
    for body in (r.body for r in server.requests if r.path == "/reveal_submission"):
        submission = by_salt.get(body["commitment_salt"])
        assert submission, (body, by_salt, [request.path for request in server.requests])
        salted = commitment_hash(body["commitment_salt"], body["fork_url"])
        assert salted == submission.commitment_hash
        assert body["tokens_per_sec"] == submission.tokens_per_sec
        assert body["commit_hash"] == submission.commit_hash
