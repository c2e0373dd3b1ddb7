"""Validators that judge commitments before their reveal, as the public service's own do."""

from __future__ import annotations

import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from neurons.miner.command_line.status import read_status
from neurons.miner.context import Context
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle, run_forever
from neurons.miner.premature import warn_of_early_judgement
from neurons.runtime.process import Stopped
from tests.neurons.fake_validator_api import (
    COMMIT,
    LOST,
    PENDING,
    REVEAL,
    ROUND,
    STATS,
    SUBMIT,
    WEIGHTS,
    FakeValidatorApi,
    Fault,
    Request,
)
from tests.neurons.miner.parts import SETTLED, FakeBench, Waits, states, stop_after


@pytest.fixture
def fake_api() -> FakeValidatorApi:
    """The public service: its validators judge what they see, its API shows no scores."""
    public = FakeValidatorApi(blocks_until_reveal=6)
    public.judges_early, public.shows_scores = True, False
    return public


@pytest.fixture
def patient(fake_api: FakeValidatorApi) -> FakeValidatorApi:
    """The public service with validators that wait for the reveal."""
    fake_api.judges_early = False
    return fake_api


def ends(context: Context) -> list[tuple[str, State]]:
    """Return how every submission of the journal was sent and where it stands, oldest first."""
    return [(row.mode, row.state) for row in reversed(context.journal.latest(100))]


def test_auto_submits_the_same_claim_directly_in_the_same_round(context, fake_api, bench):
    with capture_logs() as logs:
        done = run_cycle(context)
    assert ends(context) == [("commit_reveal", State.PREMATURE), ("direct", State.RANKED)]
    early, direct = context.journal.get(1), context.journal.get(2)
    assert done == direct
    assert (direct.rank, direct.score) == (1, None)
    assert "shows no score" in str(direct.reason)
    assert (direct.tokens_per_sec, direct.round_id) == (early.tokens_per_sec, early.round_id)
    assert sorted(bench.calls) == sorted([512, 1024, *SETTLED])  # the claim was measured once
    assert fake_api.count(REVEAL) == 0  # what nobody measured is not put into the ranking
    assert [row["is_revealed"] for row in fake_api.rows] == [False, True]
    assert sum("judges commitments before" in row["event"] for row in logs) == 1
    status = read_status(context.settings.state_dir)
    assert "SUBMISSION_MODE=auto submits directly" in status.as_text()
    assert status.as_json()["judges_early_at"] > 0


def test_commit_reveal_that_is_insisted_on_is_revealed_and_called_what_it_is(miner, fake_api):
    context = miner(submission_mode="commit_reveal")
    done = run_cycle(context)
    assert (done.state, done.rank, done.score) == (State.PREMATURE, 1, None)
    assert "nobody has measured" in str(done.reason)
    assert fake_api.count(REVEAL) == 1
    assert fake_api.count(SUBMIT) == 0
    with capture_logs() as logs:
        warn_of_early_judgement(context)
    assert [row["log_level"] for row in logs] == ["warning"]


@pytest.mark.parametrize("mode", ["commit_reveal", "auto"])
def test_the_same_content_is_not_submitted_again_in_the_round(miner, fake_api, mode):
    intervals = iter(range(4))

    def then(seconds: float) -> None:
        if seconds == 5.0 and next(intervals, None) is None:
            raise Stopped("enough")

    run_forever(miner(submission_mode=mode, waiter=Waits(then)))
    assert fake_api.count(COMMIT) == 1
    assert fake_api.count(SUBMIT) == (mode == "auto")


def test_what_is_judged_early_when_its_round_is_over_is_judged_early_all_the_same(
    context: Context, fake_api: FakeValidatorApi, waits: Waits
) -> None:
    """The server still lists it among the open commitments, whatever round it counts now."""
    waits.then = lambda _: setattr(fake_api, "round_id", 2)
    run_cycle(context)
    assert ends(context)[0] == ("commit_reveal", State.PREMATURE)
    assert fake_api.count(REVEAL) == 0


def test_before_reveal_is_pushed_before_its_direct_submission(miner, kernels):
    done = run_cycle(miner(publish_at="before_reveal"))
    assert (done.mode, done.state) == ("direct", State.RANKED)
    assert kernels.pushed == [done.commit_hash]


def test_a_row_that_was_judged_before_the_first_look_is_noticed_after_the_reveal(
    context: Context, fake_api: FakeValidatorApi, waits: Waits, url: str
) -> None:
    waits.then = lambda _: [row.update(validated=True) for row in fake_api.rows]
    fake_api.faults[STATS].extend([Fault(500, "down")] * 3)
    done = run_cycle(context)
    assert (done.mode, done.state) == ("commit_reveal", State.PREMATURE)
    assert context.journal.judges_early(url, time.time()) is not None
    assert fake_api.count(SUBMIT) == 0  # the reveal put a claim of this round into the ranking


@pytest.mark.parametrize("lists_unrevealed", [True, False])
def test_a_verdict_after_the_reveal_is_no_early_one(context, patient, url, lists_unrevealed):
    patient.lists_unrevealed = lists_unrevealed
    done = run_cycle(context)
    assert (done.mode, done.state, done.rank) == ("commit_reveal", State.RANKED, 1)
    assert context.journal.get(1).queued_at is not None
    assert State.PREMATURE not in states(context, 1)
    assert "whether it was measured is unknown" in str(done.reason)


def test_a_rank_of_what_was_never_seen_in_the_queue_is_not_believed(context, fake_api, waits):
    """Judged before the first look, and the reply to its reveal lost: nobody knows when."""
    fake_api.faults[REVEAL].append(LOST)
    waits.then = lambda _: [r.update(validated=True, judged_early=True) for r in fake_api.rows]
    fake_api.faults[STATS].extend([Fault(500, "down")] * 3)
    done = run_cycle(context)
    assert done.state is State.UNRANKED
    assert "never seen in the queue after its reveal" in str(done.reason)


def test_a_database_that_was_emptied_is_no_early_judge(context, patient, waits, url):
    waits.then = lambda _: patient.wipe_once() if patient.rows else None
    done = run_cycle(context)
    assert done.state is State.ABANDONED
    assert "lost it" in str(done.reason)
    assert context.journal.judges_early(url, time.time()) is None
    assert run_cycle(context).state is State.RANKED


def test_a_list_of_open_commitments_that_cannot_be_read_delays_nothing(context, patient):
    patient.blocks_until_reveal, patient.block = 0, 7
    patient.faults[PENDING].extend([Fault(500, "too many rows")] * 1000)
    patient.faults[REVEAL].append(Fault(425, "Cannot reveal yet. Wait 1 blocks (~0 minutes)"))
    assert run_cycle(context).state is State.RANKED
    assert patient.count(REVEAL) == 2


def test_the_place_of_an_earlier_submission_is_not_taken_for_this_ones(context, patient, bench):
    """The weights name hotkeys: two of one hotkey's submissions may be in the ranking."""
    first = run_cycle(context)
    others = [{"uid": 1, "hotkey": hotkey, "weight": 0.1} for hotkey in ("5Able", "5Other")]
    patient.judge = lambda row, score: row.update(validated=True)
    patient.weights = [others[0], *patient.weights, others[1]]
    second = run_cycle(context)  # a little faster: one place is its, and the first has none
    assert (first.state, first.rank) == (State.RANKED, 1)
    assert float(second.tokens_per_sec or 0) > float(first.tokens_per_sec or 0)
    assert (second.state, second.rank, second.weight) == (State.RANKED, 2, 0.6)
    assert second.score is None  # a place is no validation
    bench.factor = 0.9  # slower than both
    assert run_cycle(context).state is State.UNRANKED


def test_what_an_emptied_database_ranked_before_takes_no_place_in_the_new_one(
    context: Context, patient: FakeValidatorApi, bench: FakeBench
) -> None:
    """Rounds count from 1 again: a faster submission of the old round 1 is not in this one."""
    assert run_cycle(context).rank == 1
    patient.wipe()
    bench.factor = 0.9
    second = run_cycle(context)
    assert (second.state, second.rank, second.round_id) == (State.RANKED, 1, 1)


@pytest.mark.parametrize("emptied", [True, False])
def test_where_the_open_commitments_cannot_be_read_the_round_tells_who_lost_it(
    context, fake_api, url, emptied, monkeypatch
):
    """It has left the queue: by a validator, or with the whole database."""
    fake_api.judges_early = not emptied
    fake_api.faults[PENDING].extend([Fault(500, "too many rows")] * 1000)
    check = context.fork.verify

    def empty_meanwhile(commit: str) -> None:
        check(commit)
        if emptied and fake_api.rows:
            fake_api.wipe_once()

    monkeypatch.setattr(context.fork, "verify", empty_meanwhile)
    run_cycle(context)
    assert context.journal.get(1).state is (State.ABANDONED if emptied else State.PREMATURE)
    assert (context.journal.judges_early(url, time.time()) is None) is emptied
    assert (fake_api.count(REVEAL) == 0) is not emptied  # what a validator has judged stays secret


def test_a_sign_of_early_judgement_counts_for_the_length_of_a_round(miner, fake_api, url):
    """One mark by anybody must not make the public API's miners submit directly forever."""
    clock = [time.time()]
    context = miner(now=lambda: clock[0])
    assert run_cycle(context).mode == "direct"
    fake_api.round_id, fake_api.judges_early, fake_api.shows_scores = 2, False, True
    clock[0] += 47 * 3600.0
    assert run_cycle(context).mode == "direct"
    fake_api.round_id = 3
    clock[0] += 2 * 3600.0
    assert run_cycle(context).mode == "commit_reveal"
    assert context.journal.judges_early(url, clock[0]) is None


@pytest.mark.parametrize(
    ("shows_scores", "verdict", "state", "sign"),
    [
        (True, 0.0, State.REJECTED, True),
        (False, 1.0, State.RANKED, True),
        (True, 1.0, State.VALIDATED, False),
    ],
)
def test_auto_submits_directly_after_a_score_of_0_or_a_rank_without_a_score(
    context, patient, shows_scores, verdict, state, sign
):
    """The public validator fetches five rows and measures them one by one."""
    patient.shows_scores, patient.verdict = shows_scores, verdict
    first = run_cycle(context)
    assert (first.mode, first.state) == ("commit_reveal", state)
    patient.round_id, patient.verdict = 2, 1.0
    assert run_cycle(context).mode == ("direct" if sign else "commit_reveal")


def test_a_refusal_after_the_reveal_does_not_undo_it(miner, fake_api, monkeypatch):
    context, carry_out = miner(submission_mode="commit_reveal"), fake_api._carry_out
    fake_api.lists_unrevealed = False  # so that nobody sees what is judged before

    def spoil(request: Request) -> Any:
        answer = carry_out(request)
        if request.path == REVEAL:
            fake_api.rows[0].update(validated=True)
            fake_api.faults[ROUND].append(Fault(400, "no"))
        return answer

    monkeypatch.setattr(fake_api, "_carry_out", spoil)
    done = run_cycle(context)
    assert fake_api.count(REVEAL) == 1
    assert not fake_api.faults[ROUND]
    assert not {State.FAILED, State.HELD} & set(states(context, done.id))


def test_weights_that_fail_for_a_moment_hide_no_rank(context, patient):
    patient.faults[WEIGHTS].extend([Fault(500, "down")] * 9)
    done = run_cycle(context)
    assert (done.state, done.rank, done.weight) == (State.RANKED, 1, 0.6)
    assert not patient.faults[WEIGHTS]


def test_a_failed_look_after_the_reveal_is_repeated(miner, patient, monkeypatch):
    """Judged while a look before the reveal hung: the first look after it cannot be read."""
    context = miner(submission_mode="commit_reveal")
    check = context.fork.verify

    def judge_meanwhile(commit: str) -> None:
        check(commit)
        if patient.rows:
            patient.faults[STATS].extend([Fault(500, "down")] * 6)
            for row in patient.rows:
                row["validated"] = row["judged_early"] = True

    monkeypatch.setattr(context.fork, "verify", judge_meanwhile)
    done = run_cycle(context)
    assert (done.state, done.rank) == (State.PREMATURE, 1)


def test_a_second_look_that_cannot_be_read_is_no_sign_of_an_early_judgement(
    context: Context, patient: FakeValidatorApi, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look after the reveal misses it, as a list may be a moment behind."""
    carry_out = patient._carry_out

    def hide(request: Request) -> Any:
        answer = carry_out(request)
        if request.path == REVEAL:
            patient.rows[0].update(validated=True)
        return answer

    def show(_: float) -> None:
        if patient.count(REVEAL) and patient.rows[0]["validated"] and not patient.weights:
            patient.rows[0].update(validated=False)
            patient.faults[STATS].extend([Fault(500, "down")] * 3)

    monkeypatch.setattr(patient, "_carry_out", hide)
    waits.then = show
    done = run_cycle(context)
    assert (done.mode, done.state, done.rank) == ("commit_reveal", State.RANKED, 1)
    assert not patient.faults[STATS]
    assert done.judged_early_at is None


def test_a_crash_between_seeing_and_ending_it_ends_it_at_the_next_start(miner, fake_api, url):
    context = miner(waiter=Waits(stop_after(1)))
    committed = run_cycle(context)
    assert committed.state is State.COMMITTED
    context.note(context.journal.get(1), judged_early_at=5.0)
    context.journal.note_early_judgement(url, time.time())
    context.journal.close()
    again = miner()
    assert run_cycle(again).state is State.RANKED
    assert ends(again)[0] == ("commit_reveal", State.PREMATURE)
    assert fake_api.count(REVEAL) == 0
