"""Whole cycles against a real HTTP server that injects every fault of the wire."""

import json
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from itertools import count, pairwise
from types import SimpleNamespace

import pytest

from neurons.miner import daemon
from neurons.miner.context import Context
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle, run_forever
from neurons.miner.standing import BlockClock
from neurons.miner.steps.commit import SETTLE_SECONDS
from neurons.runtime.errors import Held, Retry
from neurons.runtime.git.faults import HostRefused, PrivateFork
from neurons.runtime.process import Stopped
from neurons.wire.client import ApiClient
from neurons.wire.protocol import commitment_hash
from neurons.wire.rules import block_at
from tests.neurons.fake_validator_api import (
    COMMIT,
    LOST,
    PENDING,
    RESET,
    REVEAL,
    ROUND,
    STATS,
    SUBMIT,
    WEIGHTS,
    Answer,
    FakeValidatorApi,
    Fault,
    Request,
)
from tests.neurons.miner.parts import HOTKEY, FakeFork, Miner, Waits, states, stop_after

BANNED = Fault(403, "IP address banned: IP banned for 0.5 more hours")
DUPLICATE = "Commitment hash already exists. Use a different salt."
REVEALED = "Submission already revealed"


def refusing(fake_api: FakeValidatorApi, faults: list[Exception]) -> Callable[[], None]:
    """Return a check of the fork that raises each fault once the server has a submission."""

    def check() -> None:
        if fake_api.rows and faults:
            raise faults.pop(0)

    return check


def stop_when_judged(fake_api: FakeValidatorApi) -> None:
    if fake_api.rows and fake_api.rows[0]["validated"]:
        raise Stopped("enough")


def test_a_cycle_ends_validated(context, fake_api, kernels):
    done = run_cycle(context)
    assert (done.state, done.rank, done.score, done.weight) == (State.VALIDATED, 1, 1.0, 0.6)
    assert done.weighted_score == pytest.approx(0.5 * float(done.tokens_per_sec or 0))
    assert done.tokens_per_sec == pytest.approx(0.989 * 3006, rel=1e-3)  # steady runs
    reveal, commit = fake_api.body_of(REVEAL), fake_api.body_of(COMMIT)
    assert len(bytes.fromhex(reveal["commitment_salt"])) == 32
    wanted = commitment_hash(reveal["commitment_salt"], reveal["fork_url"])
    assert commit["commitment_hash"] == wanted
    assert set(reveal["benchmarks"]) == {"512", "1024", "2048"}
    assert states(context, done.id) == [
        *(State.NEW, State.PUBLISHED, State.MEASURED, State.CLAIMED, State.COMMITTING),
        *(State.COMMITTED, State.REVEALING, State.REVEALED, State.VALIDATED),
    ]
    assert (kernels.verified, kernels.pushed) == ([done.commit_hash] * 2, [done.commit_hash])


def test_before_reveal_pushes_only_after_the_block(miner, kernels, waits):
    pushed_at_wait: list[int] = []
    waits.then = lambda _: pushed_at_wait.append(len(kernels.pushed))
    done = run_cycle(miner(publish_at="before_reveal"))
    assert done.state is State.VALIDATED
    assert kernels.pushed == [done.commit_hash]
    assert pushed_at_wait[0] == 0


@pytest.mark.parametrize("fault", [None, LOST, Fault(502, "bad gateway", stored=True)])
def test_direct_mode_submits_once_even_if_the_reply_is_lost(miner, fake_api, kernels, fault):
    fake_api.faults[SUBMIT].extend([fault] if fault else [])
    done = run_cycle(miner(submission_mode="direct"))
    assert (done.state, done.salt) == (State.VALIDATED, None)
    assert (fake_api.count(SUBMIT), len(fake_api.rows)) == (1, 1)
    assert fake_api.count(COMMIT) == 0
    assert kernels.pushed == [done.commit_hash]
    limits = [request.query["limit"] for request in fake_api.requests if request.path == STATS]
    assert limits
    assert limits == [["100"]] * len(limits)  # the most that this project's server lists


MISSING = Fault(404, "Submission not found")


@pytest.mark.parametrize(
    ("path", "faults", "sent"),
    [
        pytest.param(COMMIT, [LOST], 1, id="row_03 the reply to a commit is lost"),
        pytest.param(
            COMMIT, [Fault(500, "boom", stored=True)], 1, id="row_03 a stored commit gets 500"
        ),
        pytest.param(COMMIT, [Fault(200, b"<html>", stored=True)], 1, id="row_03 it gets a page"),
        pytest.param(COMMIT, [Fault(409, DUPLICATE, stored=True)], 1, id="row_03 it gets 409"),
        pytest.param(REVEAL, [Fault(409, REVEALED, stored=True)], 1, id="a stored reveal gets 409"),
        pytest.param(REVEAL, [LOST], 1, id="the reply to a reveal is lost"),
        pytest.param(REVEAL, [LOST, *[RESET] * 50], 1, id="only the public list shows a reveal"),
        pytest.param(REVEAL, [RESET], 2, id="a reveal is lost"),
        pytest.param(REVEAL, [MISSING] * 6, 7, id="a listed submission is not found at first"),
    ],
)
def test_row_05_a_request_is_sent_until_the_server_has_it(context, fake_api, path, faults, sent):
    fake_api.faults[path].extend(faults)
    done = run_cycle(context)
    assert (done.id, done.state) == (1, State.VALIDATED)
    assert (fake_api.count(path), len(fake_api.rows), fake_api.hash_mismatches) == (sent, 1, 0)
    assert states(context, done.id).count(State.COMMITTING) == 1  # the salt stays the same


@pytest.mark.parametrize(("replies", "pauses"), [(1, 0), (4, 2)])
def test_row_04_repeated_too_early_replies_back_off(context, fake_api, waits, replies, pauses):
    early = Fault(425, "Cannot reveal yet. Wait 3 blocks (~0 minutes)")
    fake_api.faults[REVEAL].extend([early] * replies)
    done = run_cycle(context)
    assert (done.state, fake_api.count(REVEAL)) == (State.VALIDATED, replies + 1)
    assert states(context, done.id).count(State.FAILED) == pauses
    assert not pauses or 60 <= max(waits.seconds) <= 60.5  # with a jitter of at most half a second


def test_row_10_a_reply_about_another_commitment_is_ignored(context, fake_api):
    """After a proxy's stale reply, the miner looks up its own commitment."""
    stale = {"submission_id": 77, "commitment_hash": "0" * 64, "reveal_block": 5}
    stale |= {"estimated_reveal_time": "2026-01-01T00:20:00", "message": "Commitment accepted."}
    fake_api.faults[COMMIT].append(Fault(200, json.dumps(stale).encode(), stored=True))
    done = run_cycle(context)
    assert (done.state, done.submission_id) == (State.VALIDATED, 1)
    assert fake_api.count(COMMIT) == 1


@pytest.mark.parametrize(
    "fault",
    [
        RESET,
        Fault(500, "boom"),
        Fault(503, "later", {"Retry-After": "Thu, 01 Jan 2026 00:00:00 GMT"}),
        Fault(404, b"<html><title>404 Not Found</title></html>"),
    ],
)
@pytest.mark.parametrize("path", [COMMIT, REVEAL, ROUND, WEIGHTS])
def test_row_07_temporary_faults_leave_one_commit_and_one_reveal(context, fake_api, path, fault):
    fake_api.faults[path].extend([fault] * 4)
    done = run_cycle(context)
    assert done.state is State.VALIDATED
    assert (len(fake_api.rows), fake_api.hash_mismatches) == (1, 0)
    hashes = {r.body["commitment_hash"] for r in fake_api.requests if r.path == COMMIT}
    assert hashes == {done.commitment_hash}


@pytest.mark.parametrize(
    ("fault", "seconds", "words"),
    [
        (BANNED, 1800, "0.5 more hours"),
        (Fault(429, "slow down", {"Retry-After": "70"}), 70, "slow down"),
    ],
)
def test_row_07_the_pause_of_a_server_is_kept_and_logged(
    context, fake_api, waits, fault, seconds, words
):
    fake_api.faults[COMMIT].append(fault)
    reasons: list[str] = []
    waits.then = lambda _: reasons.append(str(context.journal.latest()[0].reason))
    assert run_cycle(context).state is State.VALIDATED
    assert any(seconds <= paused <= seconds + 2 for paused in waits.seconds)
    assert words in reasons[0]


@pytest.mark.parametrize(("mode", "path"), [("commit_reveal", COMMIT), ("direct", SUBMIT)])
def test_row_09_a_missing_round_is_requested_before_the_retry(miner, fake_api, waits, mode, path):
    waits.then = lambda _: setattr(fake_api, "round_id", 2)
    text = b"Internal error: UNIQUE constraint failed: competition_rounds.round_number"
    fake_api.faults[path].append(Fault(500, text))
    done = run_cycle(miner(submission_mode=mode))
    assert (done.state, done.round_id, done.weight) == (State.VALIDATED, 2, 0.6)
    paths = [request.path for request in fake_api.requests]
    again = paths.index(path, paths.index(path) + 1)
    assert paths[again - 1] == ROUND
    assert fake_api.count(path) == 2


def test_row_03_a_stored_commit_that_is_not_listed_is_held(context, fake_api, monkeypatch):
    clock = SimpleNamespace(monotonic=map(float, count(step=SETTLE_SECONDS / 2)).__next__)
    monkeypatch.setattr("neurons.miner.steps.commit.time", clock)
    fake_api.faults[COMMIT].append(Fault(409, DUPLICATE))
    done = run_cycle(context)
    assert (done.state, done.resume_state) == (State.HELD, State.COMMITTING)
    assert (fake_api.count(COMMIT), fake_api.count(PENDING) > 1) == (1, True)
    assert "already exists" in str(done.reason)


@pytest.mark.parametrize(("mode", "path"), [("commit_reveal", REVEAL), ("direct", SUBMIT)])
def test_the_fork_is_checked_again_before_a_retry(miner, fake_api, kernels, mode, path):
    def check() -> None:
        if fake_api.count(path):
            raise Held("The branch moved.", "Put it back.")

    kernels.on_verify = check
    fake_api.faults[path].append(Fault(503, "later"))
    held = run_cycle(miner(submission_mode=mode))
    assert (held.state, held.reason) == (State.HELD, "The branch moved.")
    assert fake_api.count(path) == 1


def test_row_06_a_hash_mismatch_is_never_repeated(context, fake_api):
    fault = Fault(400, "Commitment verification failed. Hash mismatch.")
    fake_api.faults[REVEAL].append(fault)
    done = run_cycle(context)
    assert (done.state, done.resume_state) == (State.HELD, None)
    assert run_cycle(context).state is State.HELD
    assert fake_api.count(REVEAL) == 1
    daemon.abandon(context.journal, done, 1.0)
    assert run_cycle(context).state is State.VALIDATED


def test_a_damaged_salt_is_never_revealed(context: Context, fake_api: FakeValidatorApi) -> None:
    context.waiter = Waits(stop_after(1))
    committed = run_cycle(context)
    assert committed.state is State.COMMITTED
    with sqlite3.connect(context.journal.path) as database:
        database.execute("UPDATE submissions SET salt = 'x'")
    context.waiter = Waits()
    held = run_cycle(context)
    assert (held.state, held.paused, fake_api.count(REVEAL)) == (State.HELD, False, 0)


@pytest.mark.parametrize("path", [COMMIT, REVEAL])
def test_row_08_refusals_are_held_with_a_remedy_and_tried_again(context, fake_api, path):
    fake_api.faults[path].append(Fault(401, "Invalid signature"))
    held = run_cycle(context)
    assert held.state is State.HELD
    assert "WALLET_HOTKEY" in str(held.remedy)
    assert fake_api.count(path) == 1
    assert run_cycle(context).state is State.VALIDATED
    assert len(fake_api.rows) == 1


def test_row_08_an_unknown_hotkey_is_registered_once(context, fake_api):
    context.registered.add("100k")  # although the server does not know the hotkey
    assert run_cycle(context).state is State.VALIDATED
    assert fake_api.count("/register_miner") == 1
    fake_api.faults[COMMIT].extend([Fault(404, "Miner not registered")] * 3)
    held = run_cycle(context)
    assert held.state is State.HELD
    assert "btcli" in str(held.remedy)
    assert fake_api.count("/register_miner") == 3

    # a failed registration of a known hotkey is ignored
    fake_api.faults["/register_miner"].append(Fault(500, b"Internal Server Error"))
    context.registered.clear()
    daemon.release(context.journal, held, 1.0)
    assert run_cycle(context).state is State.VALIDATED


def test_a_submission_lost_by_the_server_is_abandoned(context, fake_api):
    """Its database is the same, but the row has gone."""
    fake_api.before[REVEAL] = fake_api.rows.clear
    lost = run_cycle(context)
    assert lost.state is State.ABANDONED
    assert "Submission not found" in str(lost.reason)
    fake_api.before.clear()
    assert run_cycle(context).state is State.VALIDATED


def test_another_empty_database_that_answers_for_a_while_is_no_loss(context, fake_api):
    """A gateway asks a copy that has not received the row yet."""
    empty = json.dumps({"current_block": 9000, "pending_reveals": []}).encode()
    fake_api.after[COMMIT] = lambda: setattr(fake_api, "block", 9000)
    fake_api.faults[REVEAL].append(MISSING)
    seen = iter(range(100))
    real = fake_api._pending_reveals

    def pending(request):
        after_404 = fake_api.count(REVEAL) == 1
        return Answer(200, empty) if after_404 and next(seen) < 2 else real(request)

    fake_api._pending_reveals = pending
    done = run_cycle(context)
    assert (done.id, done.state, fake_api.count(REVEAL)) == (1, State.VALIDATED, 2)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("number", [1, 3, 77])
def test_the_list_decides_on_the_number_of_a_commitment(context, fake_api, number, listed):
    """The commit's reply names another miner's row, an own one of another target, or none."""
    fake_api.add_foreign()
    fake_api.after[COMMIT] = lambda: fake_api.add_foreign(miner_hotkey=HOTKEY)

    def wrong(request: Request) -> Answer:
        answer = real(request)
        return Answer(200, json.dumps({**answer, "submission_id": number}).encode())

    real, fake_api._commit_submission = fake_api._commit_submission, wrong
    if not listed:  # at first
        fake_api.faults[PENDING].extend([Fault(500, "too many rows")] * 9)
        fake_api.block = block_at(time.time())
    done = run_cycle(context)
    own = next(row for row in fake_api.rows if row["commitment_hash"] == done.commitment_hash)
    assert (done.id, done.submission_id) == (1, own["id"])
    assert (own["is_revealed"], fake_api.hash_mismatches) == (True, 0)
    assert done.state in (State.VALIDATED, State.UNRANKED)  # the other row is foreign


@pytest.mark.parametrize("change", [{"submission_id": 2}, {"is_revealed": False}])
@pytest.mark.parametrize("stored", [True, False])
def test_only_a_reply_that_confirms_the_reveal_counts(context, fake_api, change, stored):
    reply = {"submission_id": 1, "miner_hotkey": HOTKEY, "commit_hash": "a" * 40, **change}
    reply = {"fork_url": FakeFork.url, "is_revealed": True, **reply}
    fake_api.faults[REVEAL].extend([Fault(200, json.dumps(reply).encode(), stored=stored)] * 3)
    done = run_cycle(context)
    assert done.state is State.VALIDATED
    assert fake_api.rows[0]["is_revealed"]
    assert fake_api.count(REVEAL) == (1 if stored else 4)


class CachedList:
    """A cache between miner and API that never expires, and the time of both."""

    def __init__(self, fake_api: FakeValidatorApi, ahead: int = 0) -> None:
        self.fake_api, self.seconds, self.ahead = fake_api, 1.8e9, ahead
        self.kept: Answer | None = None
        self.real = fake_api._pending_reveals
        fake_api._pending_reveals = self.pending  # type: ignore[method-assign]
        fake_api.clock = lambda: self.seconds
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        self.seconds += seconds
        self.fake_api.block = block_at(self.seconds) + self.ahead

    def pending(self, request: Request) -> Answer:
        if self.kept is None and self.fake_api.rows:
            self.kept = Answer(200, json.dumps(self.real(request)).encode())
            self.wait(0.0)
        return self.kept or self.real(request)


@pytest.mark.parametrize(
    ("date", "ahead", "restarts"),
    [
        ("right", 0, False),
        ("right", -10_000_000, True),
        ("old", 0, True),
        ("old", -10_000_000, False),
        ("absent", 0, True),
        ("absent", -10_000_000, False),
    ],
)
def test_a_cached_list_stops_no_reveal(miner, fake_api, url, monkeypatch, date, ahead, restarts):
    """With the list, its Date may be old; the server may count its blocks from another time."""
    fake_api.blocks_until_reveal = 25
    cache = CachedList(fake_api, ahead)
    clock = SimpleNamespace(monotonic=lambda: cache.seconds)
    monkeypatch.setattr("neurons.miner.standing.time", clock)
    waits = Waits(cache.wait)
    context = miner(waiter=waits, now=lambda: cache.seconds)
    context.client = ApiClient(url, context.identity, now=lambda: cache.seconds)
    offset = {"right": 0.0, "old": -7200.0, "absent": None}[date]
    monkeypatch.setattr(context.client, "_note_clock", lambda _: None)
    context.client.clock_offset = offset
    if restarts:
        stop = stop_after(1)
        waits.then = lambda s: (cache.wait(s), stop(s) if cache.kept else None)
        run_cycle(context)
        context.blocks, waits.then = BlockClock(), cache.wait
    committed_at = cache.seconds
    done = run_cycle(context)
    assert (done.state, fake_api.hash_mismatches) == (State.VALIDATED, 0)
    late = fake_api.rows[0]["revealed_at"] - committed_at - 25 * 12.0
    assert late < 180.0, late
    assert fake_api.count(REVEAL) <= 3


SPELLINGS: list[Callable[[str], str]] = [
    lambda text: text + "Z",
    lambda text: text + "+00:00",
    lambda text: text.partition(".")[0] + ".734561",
    lambda text: text.partition(".")[0],
    lambda text: text.replace("T", " "),
]


@pytest.mark.parametrize(("spell", "when"), list(zip(SPELLINGS, (1, 2, 3, 5, 7), strict=True)))
@pytest.mark.parametrize("mode", ["direct", "commit_reveal"])
def test_an_api_may_write_its_times_and_hashes_in_another_way(miner, fake_api, spell, when, mode):
    """It changes at each wait of the first cycle, in turn, or after it."""
    intervals = 0

    def then(seconds: float) -> None:
        nonlocal intervals
        intervals += seconds == 5.0
        if len(waits.seconds) == when:
            fake_api.spell, fake_api.spell_hash = spell, str.upper
        if len(waits.seconds) < 3:
            fake_api.faults[STATS].extend([Fault(502, "gateway")] * 3)
        if intervals == 8:
            raise Stopped("enough")

    waits = Waits(then)
    fake_api.faults[COMMIT].append(LOST)
    fake_api.faults[SUBMIT].append(LOST)
    context = miner(waiter=waits, submission_mode=mode)
    run_forever(context)
    assert [row.state for row in context.journal.latest(9)] == [State.VALIDATED]
    assert (len(fake_api.rows), len(waits.seconds) >= when) == (1, True)


@pytest.mark.parametrize("status", [400, 402, 410])
def test_row_06_a_refused_reveal_is_repeated_by_release_alone(miner, fake_api, waits, status):
    fake_api.faults[REVEAL].append(Fault(status, "This fork is not accepted."))
    waits.then = lambda seconds: stop_after(1)(0) if waits.seconds.count(5.0) == 9 else None
    clock = iter(range(10**9, 10**12, 86400))
    for _ in range(3):  # neither days nor starts repeat it
        context = miner(now=lambda: float(next(clock)))
        run_forever(context)
        waits.seconds.clear()
    held = context.journal.get(1)
    assert (held.state, fake_api.count(REVEAL)) == (State.HELD, 1)
    assert "`release` sends the reveal again" in str(held.remedy)
    daemon.release(context.journal, held, 1.0)
    assert run_cycle(context).state is State.VALIDATED
    assert fake_api.count(REVEAL) == 2


def test_row_13_a_restart_after_the_round_reveals_once(context, fake_api):
    context.waiter = Waits(stop_after(1))
    assert run_cycle(context).state is State.COMMITTED
    fake_api.round_id, fake_api.block, fake_api.verdict = 2, 10_000_000, None
    context.waiter = Waits()
    old = run_cycle(context)
    assert old.state is State.UNRANKED
    assert "ended" in str(old.reason)
    assert fake_api.count(REVEAL) == 1
    fake_api.verdict = 1.0
    assert run_cycle(context).id == old.id + 1


def test_row_35_three_rejections_stop_the_miner(context, fake_api):
    fake_api.verdict = 0.0
    for _ in range(3):
        assert run_cycle(context).state is State.REJECTED
    held = run_cycle(context)
    assert (held.state, held.resume_state) == (State.HELD, State.NEW)
    assert (fake_api.count(COMMIT), fake_api.count(SUBMIT)) == (1, 2)
    assert run_cycle(context).state is State.HELD  # a restart does not suffice
    context.now = map(float, count(2e9, 86400.0)).__next__  # nor do days
    context.waiter = Waits(stop_after(9))
    run_forever(context)
    assert (fake_api.count(COMMIT), fake_api.count(SUBMIT)) == (1, 2)
    context.waiter = Waits()
    fake_api.verdict = 1.0
    daemon.release(context.journal, context.journal.get(held.id), 1.0)
    assert run_cycle(context).state is State.VALIDATED


# ---- faults between the commitment and the reveal ---------------------------------------------


@pytest.mark.parametrize("publish_at", ["before_commit", "before_reveal"])
def test_temporary_refusals_of_the_host_only_delay_the_reveal(
    miner: Miner, fake_api: FakeValidatorApi, kernels: FakeFork, waits: Waits, publish_at: str
) -> None:
    """A 403, a 404 or an invalid certificate is temporary, because the access worked before."""
    refusals: list[Exception] = [HostRefused("refusal", "Check the token.")] * 3
    refusals += [PrivateFork("private", "Make it public.")] * 3
    kernels.on_verify = refusing(fake_api, refusals)
    done = run_cycle(miner(publish_at=publish_at))
    assert (done.state, refusals) == (State.VALIDATED, [])
    assert State.HELD not in states(miner(), done.id)
    pauses = [pause for pause in waits.seconds if pause not in (1.0, 15.0)]
    assert (len(pauses), pauses) == (6, sorted(pauses))


def test_refusals_before_the_commitment_are_held_with_growing_pauses(
    context: Context, fake_api: FakeValidatorApi, kernels: FakeFork, waits: Waits
) -> None:
    """The pauses grow although failures with short pauses come before the first HELD."""
    clock, tries = [1e9], []
    context.now = lambda: clock[0]
    faults: list[Exception] = [Retry("reset")] * 9
    faults += [HostRefused("403", "Check the token.")] * 9

    def check() -> None:
        if faults:
            tries.append((type(faults[0]), clock[0]))
            raise faults.pop(0)

    def then(seconds: float) -> None:
        clock[0] += 60.0 if seconds == 5.0 else seconds
        stop_when_judged(fake_api)

    kernels.on_verify, waits.then = check, then
    run_forever(context)
    assert context.journal.get(1).state is State.VALIDATED
    held = [at for kind, at in tries if kind is HostRefused]
    pauses = [after - before for before, after in pairwise(held)]
    limits = [600.0, 1200.0, 2400.0, 4800.0, 9600.0, 19200.0, 21600.0, 21600.0]
    assert all(0 <= p - limit < 61 for p, limit in zip(pauses, limits, strict=True)), pauses


@pytest.mark.parametrize(
    "path", [ROUND, "/register_miner", COMMIT, SUBMIT, STATS, PENDING, WEIGHTS]
)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422, 451])
def test_no_refusal_outside_the_reveal_waits_for_the_owner(miner, fake_api, waits, path, status):
    """A 4xx with a `detail` may come from a gateway, also for an unsigned GET."""
    clock = [1e9]
    direct = path == SUBMIT
    context = miner(now=lambda: clock[0], submission_mode="direct" if direct else "commit_reveal")
    fake_api.faults[path].extend([Fault(status, "Denied by the gateway.")] * 4)

    def then(seconds: float) -> None:
        clock[0] += 600.0 if seconds == 5.0 else seconds
        if fake_api.rows and fake_api.rows[-1]["validated"] and seconds == 5.0:
            raise Stopped("enough")

    waits.then = then
    run_forever(context)
    assert (context.journal.get(1).state, fake_api.faults[path]) == (State.VALIDATED, deque())
    assert len(fake_api.rows) == 1


def test_a_commitment_held_before_its_reveal_is_retried(context, fake_api, kernels, waits):
    clock = [1_000_000.0]
    context.now = lambda: clock[0]
    repaired_at = clock[0] + 3 * 86400.0

    def check() -> None:
        if fake_api.rows and clock[0] < repaired_at:
            raise Held("The branch moved.", "Put it back.")

    def then(seconds: float) -> None:
        clock[0] += 300.0 if seconds == 5.0 else seconds
        stop_when_judged(fake_api)

    kernels.on_verify, waits.then = check, then
    run_forever(context)
    assert (context.journal.get(1).state, fake_api.count(REVEAL)) == (State.VALIDATED, 1)
    tries = states(context, 1).count(State.HELD)
    assert 3 * 86400 / 900 <= tries <= 3 * 86400 / 600


def test_row_12_a_clock_set_back_does_not_delay_a_held_commitment(
    context: Context, fake_api: FakeValidatorApi, kernels: FakeFork, waits: Waits
) -> None:
    year = 365 * 86400.0
    clock = [2 * year]
    context.now = lambda: clock[0]

    def then(seconds: float) -> None:
        if context.journal.get(1).state is State.HELD:
            clock[0] = year
        stop_when_judged(fake_api)

    kernels.on_verify = refusing(fake_api, [Held("The branch moved.", "Go back.")])
    waits.then = then
    run_forever(context)
    assert states(context, 1).count(State.HELD) == 1
    assert context.journal.get(1).state is State.VALIDATED
