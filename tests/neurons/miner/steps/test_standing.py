"""Cycles despite other miners' rows, unreadable lists, lost replies and emptied databases."""

import time
from dataclasses import replace
from typing import Any

import pytest

from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.miner.daemon import run_cycle
from neurons.miner.standing import read_standing
from neurons.miner.steps.follow import POLLS_WITHOUT_STATUS
from neurons.miner.steps.submit import LATE_SECONDS
from neurons.wire.client import ApiClient
from neurons.wire.rules import block_at
from tests.neurons.fake_validator_api import (
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
    serve,
)
from tests.neurons.miner.parts import HOTKEY, Miner, Waits, states, stop_after


@pytest.fixture
def revealed(context: Context, fake_api: FakeValidatorApi) -> Submission:
    """A submission that `context` has revealed and that waits for a validator."""
    fake_api.verdict = None
    context.waiter = Waits(stop_after(2))
    submission = run_cycle(context)
    assert submission.state is State.REVEALED
    context.waiter = Waits()
    return submission


@pytest.fixture
def direct(miner: Miner) -> Context:
    """A miner that submits in one call."""
    return miner(submission_mode="direct")


@pytest.mark.parametrize("newer", [50, 9_000])
def test_newer_rows_do_not_hide_the_submission(context, fake_api, revealed, newer):
    fake_api.add_foreign(newer)
    assert read_standing(revealed, context.client).queued is True
    fake_api.rows[0]["validated"] = True
    assert read_standing(revealed, context.client).queued is False


@pytest.mark.usefixtures("revealed")
def test_a_list_that_is_too_short_proves_nothing(context, fake_api, monkeypatch):
    monkeypatch.setattr("neurons.miner.standing.LIMITS", (100,))
    fake_api.add_foreign(900)
    context.waiter = Waits(stop_after(1))
    assert run_cycle(context).state is State.REVEALED


def test_a_list_that_is_too_large_is_read_with_fewer_rows(context, fake_api, revealed, monkeypatch):
    monkeypatch.setattr("neurons.wire.client.LIST_BYTES", 2**22)
    fake_api.add_foreign(12, fork_url="https://example/" + "a" * 400_000)
    assert read_standing(revealed, context.client).queued is None  # the list has 3 other rows
    fake_api.rows.append(fake_api.rows.pop(0))
    assert read_standing(revealed, context.client).queued is True


@pytest.mark.usefixtures("revealed")
@pytest.mark.parametrize(("score", "state"), [(1.0, State.VALIDATED), (0.0, State.REJECTED)])
def test_statistics_that_fail_for_some_time_hide_no_score(context, fake_api, score, state):
    """Meanwhile the weights show a rank, which depends on the claim alone."""
    fake_api.judge(fake_api.rows[0], score)
    fake_api.faults[STATS].extend([Fault(200, b"<html>")] * (POLLS_WITHOUT_STATUS - 1))
    done = run_cycle(context)
    assert (done.state, done.score) == (state, score)
    assert not fake_api.faults[STATS]


@pytest.mark.usefixtures("revealed")
def test_the_weights_show_the_verdict_if_statistics_stay_broken(context, fake_api):
    """A row with NaN makes /get_submission_stats a 500 for everybody."""
    fake_api.add_foreign(tokens_per_sec=float("nan"))
    context.waiter = Waits(stop_after(3))
    assert run_cycle(context).state is State.REVEALED  # no validator has judged it
    fake_api.judge(fake_api.rows[0], 1.0)
    context.waiter = Waits()
    done = run_cycle(context)
    assert (done.state, done.rank, done.score) == (State.RANKED, 1, None)


@pytest.mark.usefixtures("revealed")
def test_the_rounds_end_ends_a_submission_if_statistics_stay_broken(context, fake_api):
    fake_api.add_foreign(tokens_per_sec=float("nan"))
    fake_api.round_id = 2
    fake_api.faults[WEIGHTS].extend([Fault(500, "broken")] * 9)
    done = run_cycle(context)
    assert done.state is State.UNRANKED
    assert len(fake_api.faults[WEIGHTS]) >= 6  # the weights are requested only once
    context.waiter = Waits(stop_after(4))
    assert run_cycle(context).id == done.id + 1


def test_a_failed_read_of_the_round_after_a_direct_submission_undoes_nothing(direct, fake_api):
    fake_api.after[SUBMIT] = lambda: fake_api.faults[ROUND].extend([Fault(500, "no")] * 3)
    done = run_cycle(direct)
    assert (done.state, fake_api.count(SUBMIT)) == (State.VALIDATED, 1)
    assert not {State.FAILED, State.HELD} & set(states(direct, done.id)[:-1])


def test_a_direct_submission_that_may_have_arrived_is_not_repeated(direct, fake_api, waits):
    """Its reply was lost, and it was judged before the next poll, so no list shows it."""
    waits.then = lambda _: fake_api.rows[0].update(validated=True)
    fake_api.verdict = None
    fake_api.faults[SUBMIT].append(LOST)
    fake_api.faults[STATS].extend([Fault(502, "gateway")] * 3)
    done = run_cycle(direct)
    assert done.state is State.UNRANKED
    assert "cannot be known" in str(done.reason)
    assert fake_api.count(SUBMIT) == 1


def test_a_judged_direct_submission_is_recognised_by_its_claim(direct, fake_api, waits):
    def judge(_: float) -> None:
        if not fake_api.performers:
            fake_api.judge(fake_api.rows[0], 1.0)
            others: list[dict[str, Any]] = [
                {"id": 99, "miner_hotkey": "5Other"},
                {"id": 98, "tokens_per_sec": 1e12},
                {"id": 97, "target_sequence_length": 512},
            ]
            fake_api.performers[:0] = [{**fake_api.performers[0], **one} for one in others]

    waits.then = judge
    fake_api.faults[SUBMIT].append(LOST)
    fake_api.faults[STATS].extend([Fault(502, "gateway")] * 3)
    done = run_cycle(direct)
    assert (done.state, done.submission_id, fake_api.count(SUBMIT)) == (State.VALIDATED, 1, 1)
    assert LATE_SECONDS not in waits.seconds  # it was found at once


def test_a_direct_submission_that_arrives_late_is_not_sent_twice(direct, fake_api, waits):
    """A gateway answers 504 and still delivers the request some seconds later."""

    def arrive(seconds: float) -> None:
        if seconds == LATE_SECONDS and not fake_api.rows:
            body = fake_api.body_of(SUBMIT)
            fake_api.handle(Request("POST", SUBMIT, {}, {"hotkey": HOTKEY}, body))

    waits.then = arrive
    fake_api.faults[SUBMIT].append(Fault(504, "gateway timeout"))
    assert run_cycle(direct).state is State.VALIDATED
    assert (len(fake_api.rows), waits.seconds.count(LATE_SECONDS)) == (1, 1)


@pytest.mark.parametrize("others", [0, 1])
def test_a_direct_submission_that_did_not_arrive_is_sent_again(direct, fake_api, others):
    """A second machine may have queued another commit for the same target at the same time."""
    own = {"miner_hotkey": HOTKEY, "target_sequence_length": 2048, "commit_hash": "0" * 40}
    fake_api.add_foreign(others, **own)
    fake_api.faults[SUBMIT].append(Fault(502, "gateway"))
    done = run_cycle(direct)
    assert (done.state, done.submission_id) == (State.VALIDATED, others + 1)
    assert fake_api.count(SUBMIT) == 2


@pytest.mark.parametrize("fault", [Fault(429, "slow down"), Fault(403, "Denied by the gateway.")])
def test_a_refused_direct_submission_is_repeated_despite_others(direct, fake_api, waits, fault):
    fake_api.faults[SUBMIT].append(fault)
    waits.then = lambda _: fake_api.add_foreign()
    if fault.status == 403:
        assert run_cycle(direct).state is State.HELD
        fake_api.add_foreign()
    assert run_cycle(direct).state is State.VALIDATED
    assert [row["miner_hotkey"] for row in fake_api.rows].count(HOTKEY) == 1


@pytest.mark.parametrize("created_at", ["2020-01-01T00:00:00", "some days ago"])
def test_an_earlier_row_of_the_same_claim_is_another_submission(direct, fake_api, created_at):
    fake_api.verdict = None
    direct.waiter = Waits(stop_after(1))
    first = run_cycle(direct)
    assert first.state is State.REVEALED
    fake_api.rows[0]["created_at"] = created_at
    direct.journal.transition(first, replace(first, state=State.UNRANKED))
    fake_api.faults[SUBMIT].append(Fault(502, "gateway"))
    stop = stop_after(1)
    direct.waiter = Waits(lambda seconds: stop(seconds) if len(fake_api.rows) == 2 else None)
    second = run_cycle(direct)
    assert (second.state, second.submission_id) == (State.REVEALED, 2)


@pytest.mark.parametrize("earlier", [0.0, 7200.0, -7200.0])
def test_rows_of_an_api_behind_a_front_end_with_another_clock_are_found(
    miner: Miner, fake_api: FakeValidatorApi, url: str, earlier: float
) -> None:
    """The API's own clock dates its rows and rounds; the Date header is the front end's."""
    context = miner(submission_mode="direct")
    context.now = lambda: time.time() + 7200  # this machine's clock is two hours ahead
    context.client = ApiClient(url, context.identity, now=context.now)
    fake_api.clock = lambda: time.time() - earlier
    fake_api.faults[SUBMIT].append(LOST)
    done = run_cycle(context)
    assert (done.state, fake_api.count(SUBMIT)) == (State.VALIDATED, 1)


def test_without_a_list_the_block_is_computed_from_the_servers_clock(context, fake_api):
    clock = [float(int(time.time()))]
    fake_api.block, fake_api.blocks_until_reveal = block_at(clock[0]), 6
    fake_api.faults[PENDING].extend([Fault(500, "too many rows")] * 1000)

    def pass_time(_: float) -> None:
        clock[0] += 1.0
        fake_api.block = block_at(clock[0])

    context.waiter = Waits(pass_time)
    with serve(fake_api, date="soon") as address:
        context.client = ApiClient(address, context.identity, now=lambda: clock[0])
        assert run_cycle(context).state is State.VALIDATED
        context.client.close()
    assert fake_api.count(REVEAL) == 1  # none was too early
