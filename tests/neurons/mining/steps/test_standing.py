"""Verdicts that other people's rows, a broken list or another database must not hide or forge."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from neurons.mining.api.client import ApiClient
from neurons.mining.api.standing import look
from neurons.mining.context import Context
from neurons.mining.daemon import run_cycle
from neurons.mining.steps.follow import BLIND_LOOKS
from neurons.mining.steps.submit import LATE_SECONDS
from neurons.mining.submissions.cycle import State, Submission
from tests.neurons.mining.parts import HOTKEY, Miner, Waits, states, stop_after
from tests.neurons.stand_in import (
    COMMIT,
    LOST,
    PENDING,
    REVEAL,
    ROUND,
    STATS,
    SUBMIT,
    WEIGHTS,
    Fault,
    Request,
    StandIn,
)


@pytest.fixture
def revealed(context: Context, stand_in: StandIn) -> Submission:
    """What `context` has brought to where it waits for a validator."""
    stand_in.verdict = None
    context.waiter = Waits(stop_after(2))
    submission = run_cycle(context)
    assert submission.state is State.REVEALED
    context.waiter = Waits()
    return submission


@pytest.fixture
def direct(miner: Miner) -> Context:
    """A miner that submits in one call."""
    return miner(submission_mode="direct")


@pytest.mark.parametrize("newer", [50, 900, 9_000])
def test_newer_rows_hide_neither_queue_nor_verdict(
    context: Context, stand_in: StandIn, revealed: Submission, newer: int
) -> None:
    stand_in.add_foreign(newer)
    assert look(revealed, context.client).queued is True
    stand_in.rows[0]["validated"] = True
    assert look(revealed, context.client).queued is False


@pytest.mark.usefixtures("revealed")
def test_a_list_that_ends_before_ours_proves_nothing(
    context: Context, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neurons.mining.api.standing.LIMITS", (100,))
    stand_in.add_foreign(900)
    context.waiter = Waits(stop_after(1))
    assert run_cycle(context).state is State.REVEALED


def test_rows_too_long_to_read_are_asked_for_in_smaller_numbers(
    context: Context, stand_in: StandIn, revealed: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neurons.mining.api.client.LIST_BYTES", 2**22)
    stand_in.add_foreign(12, fork_url="https://example/" + "a" * 400_000)
    assert look(revealed, context.client).queued is None  # the newest three are not ours
    stand_in.rows.append(stand_in.rows.pop(0))
    assert look(revealed, context.client).queued is True


@pytest.mark.usefixtures("revealed")
@pytest.mark.parametrize(("score", "state"), [(1.0, State.VALIDATED), (0.0, State.REJECTED)])
def test_statistics_that_fail_for_a_moment_hide_no_score(
    context: Context, stand_in: StandIn, score: float, state: State
) -> None:
    """The weights name a rank meanwhile, by the claim alone."""
    stand_in.judge(stand_in.rows[0], score)
    stand_in.faults[STATS].extend([Fault(200, b"<html>")] * (BLIND_LOOKS - 1))
    done = run_cycle(context)
    assert (done.state, done.score) == (state, score)
    assert not stand_in.faults[STATS]


@pytest.mark.usefixtures("revealed")
def test_statistics_that_one_row_has_broken_delay_no_end(
    context: Context, stand_in: StandIn
) -> None:
    """A row with NaN makes /get_submission_stats a 500 for everybody."""
    stand_in.add_foreign(tokens_per_sec=float("nan"))
    context.waiter = Waits(stop_after(3))
    assert run_cycle(context).state is State.REVEALED  # nobody has judged it
    stand_in.judge(stand_in.rows[0], 1.0)
    context.waiter = Waits()
    done = run_cycle(context)
    assert (done.state, done.rank, done.score) == (State.RANKED, 1, None)


@pytest.mark.usefixtures("revealed")
def test_with_broken_statistics_the_rounds_end_is_seen(context: Context, stand_in: StandIn) -> None:
    stand_in.add_foreign(tokens_per_sec=float("nan"))
    stand_in.round_id = 2
    stand_in.faults[WEIGHTS].extend([Fault(500, "broken")] * 9)
    done = run_cycle(context)
    assert done.state is State.UNRANKED
    assert len(stand_in.faults[WEIGHTS]) >= 6  # they are asked for once, and not waited for
    context.waiter = Waits(stop_after(4))
    assert run_cycle(context).id == done.id + 1


@pytest.mark.usefixtures("revealed")
def test_an_empty_database_is_no_verdict(context: Context, stand_in: StandIn) -> None:
    """The API comes back with round 1 again, and nothing of ours in its queue."""
    stand_in.wipe()
    lost = run_cycle(context)
    assert lost.state is State.ABANDONED
    assert "lost it" in str(lost.reason)
    stand_in.verdict = 1.0
    assert run_cycle(context).state is State.VALIDATED
    assert len(stand_in.rows) == 1


def test_an_empty_database_is_no_verdict_on_a_direct_submission(
    direct: Context, stand_in: StandIn
) -> None:
    stand_in.verdict, direct.waiter = None, Waits(stop_after(1))
    assert run_cycle(direct).state is State.REVEALED
    stand_in.wipe()
    direct.waiter = Waits()
    assert run_cycle(direct).state is State.ABANDONED


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (500, 3)])
def test_what_the_round_says_behind_a_direct_submission_undoes_nothing(
    direct: Context, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, status: int, tries: int
) -> None:
    carry_out = stand_in._carry_out

    def spoil(request: Request) -> Any:
        if request.path == SUBMIT:
            stand_in.faults[ROUND].extend([Fault(status, "no")] * tries)
        return carry_out(request)

    monkeypatch.setattr(stand_in, "_carry_out", spoil)
    done = run_cycle(direct)
    assert (done.state, stand_in.count(SUBMIT)) == (State.VALIDATED, 1)
    assert not {State.FAILED, State.HELD} & set(states(direct, done.id)[:-1])


def test_an_api_that_lost_the_commitment_at_the_reveal_gets_a_new_one(
    context: Context, stand_in: StandIn, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neurons.mining.steps.reveal.is_shown_revealed", lambda *_: False)
    stand_in.faults[REVEAL].append(LOST)
    waits.then = lambda _: stand_in.wipe_once() if stand_in.count(REVEAL) else None
    lost = run_cycle(context)
    assert (lost.state, stand_in.count(REVEAL)) == (State.ABANDONED, 3)  # registered again between
    assert run_cycle(context).state is State.VALIDATED


def test_a_commitment_of_unknown_fate_is_looked_for_before_it_is_sent_again(
    context: Context, stand_in: StandIn
) -> None:
    stand_in.faults[COMMIT].append(LOST)
    stand_in.faults[PENDING].extend([Fault(502, "gateway")] * 3)
    assert run_cycle(context).state is State.VALIDATED
    assert (len(stand_in.rows), stand_in.count(COMMIT)) == (1, 1)


def test_a_direct_submission_of_unknown_fate_is_not_sent_twice(
    direct: Context, stand_in: StandIn, waits: Waits
) -> None:
    """Stored, its reply lost, and judged before anybody could look: no list shows it."""
    waits.then = lambda _: stand_in.rows[0].update(validated=True)
    stand_in.verdict = None
    stand_in.faults[SUBMIT].append(LOST)
    stand_in.faults[STATS].extend([Fault(502, "gateway")] * 3)
    done = run_cycle(direct)
    assert done.state is State.UNRANKED
    assert "cannot be known" in str(done.reason)
    assert stand_in.count(SUBMIT) == 1


def test_a_direct_submission_that_was_judged_before_a_look_is_known_by_its_speed(
    direct: Context, stand_in: StandIn, waits: Waits
) -> None:
    def judged(_: float) -> None:
        if not stand_in.performers:
            stand_in.judge(stand_in.rows[0], 1.0)
            ours = stand_in.performers[0]
            others: list[dict[str, Any]] = [
                {"id": 99, "miner_hotkey": "5Other"},
                {"id": 98, "tokens_per_sec": 1e12},
                {"id": 97, "tokens_per_sec": 1.0},
            ]
            others += [
                {"id": 90 + by, "target_sequence_length": ours["target_sequence_length"] + by}
                for by in (-1, 1)
            ]
            stand_in.performers[:0] = [{**ours, **one} for one in others]

    waits.then = judged
    stand_in.faults[SUBMIT].append(LOST)
    stand_in.faults[STATS].extend([Fault(502, "gateway")] * 3)
    done = run_cycle(direct)
    assert (done.state, done.submission_id, stand_in.count(SUBMIT)) == (State.VALIDATED, 1, 1)
    assert LATE_SECONDS not in waits.seconds  # it was found at once


def test_a_direct_submission_that_arrives_late_is_not_sent_twice(
    direct: Context, stand_in: StandIn, waits: Waits
) -> None:
    """A gateway gives the miner up after 30 s, and passes the request on some seconds later."""

    def arrives(seconds: float) -> None:
        if seconds == LATE_SECONDS and not stand_in.rows:
            body = stand_in.body_of(SUBMIT)
            stand_in.handle(Request("POST", SUBMIT, {}, {"hotkey": HOTKEY}, body))

    waits.then = arrives
    stand_in.faults[SUBMIT].append(Fault(504, "gateway timeout"))
    assert run_cycle(direct).state is State.VALIDATED
    assert (len(stand_in.rows), waits.seconds.count(LATE_SECONDS)) == (1, 1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_database_that_is_emptied_around_a_direct_submission_is_told_apart(
    direct: Context, stand_in: StandIn, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.registered.add(HOTKEY)
    carry_out = stand_in._carry_out

    def around(request: Request) -> Any:
        if request.path != SUBMIT or stand_in.databases > 1:
            return carry_out(request)
        if when == "before":
            stand_in.wipe()
            stand_in.registered.add(HOTKEY)
            return carry_out(request)
        answer = carry_out(request)
        stand_in.wipe()
        return answer

    monkeypatch.setattr(stand_in, "_carry_out", around)
    done = run_cycle(direct)
    assert done.state is (State.VALIDATED if when == "before" else State.ABANDONED)
    emptied = "2026-01-02T00:00:01"  # the first round of the second database
    assert (done.round_start == emptied) is (when == "before")


def test_a_commitment_that_came_into_an_emptied_database_is_not_taken_for_lost(
    context: Context, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its round is of the old database, and the new one holds it all the same."""
    stand_in.shows_scores = False
    carry_out = stand_in._carry_out

    def empty(request: Request) -> Any:
        if request.path == COMMIT and stand_in.databases == 1:
            stand_in.wipe()
            stand_in.registered.add(HOTKEY)
        return carry_out(request)

    monkeypatch.setattr(stand_in, "_carry_out", empty)
    done = run_cycle(context)
    assert (done.state, done.rank, done.id) == (State.RANKED, 1, 1)
    assert stand_in.count(REVEAL) == 2  # the second asks whether it is held
    assert len(stand_in.rows) == 1


@pytest.mark.parametrize("fault", [Fault(502, "gateway"), Fault(404, b"<html>")])
def test_a_direct_submission_that_did_not_arrive_is_sent_again(
    direct: Context, stand_in: StandIn, fault: Fault
) -> None:
    stand_in.faults[SUBMIT].append(fault)
    assert run_cycle(direct).state is State.VALIDATED
    assert (stand_in.count(SUBMIT), len(stand_in.rows)) == (2, 1)


@pytest.mark.parametrize("digit", ["0", "f"])
def test_another_commit_of_this_hotkey_is_not_taken_for_the_direct_submission(
    direct: Context, stand_in: StandIn, digit: str
) -> None:
    """A second machine's: of the same target, as new, and in the queue."""
    add = stand_in.add_foreign
    add(miner_hotkey=HOTKEY, target_sequence_length=2048, commit_hash=digit * 40)
    stand_in.faults[SUBMIT].append(Fault(502, "gateway"))
    done = run_cycle(direct)
    assert (done.state, done.submission_id, stand_in.count(SUBMIT)) == (State.VALIDATED, 2, 2)


def test_a_round_that_counts_fewer_than_before_proves_nothing(
    direct: Context, stand_in: StandIn, waits: Waits
) -> None:
    stand_in.add_foreign(2)
    waits.then = lambda _: stand_in.rows.clear()
    stand_in.faults[SUBMIT].append(Fault(502, "gateway"))
    done = run_cycle(direct)
    assert (done.state, stand_in.count(SUBMIT)) == (State.UNRANKED, 1)


def test_what_was_certainly_not_taken_is_sent_again_whoever_came_in_meanwhile(
    direct: Context, stand_in: StandIn, waits: Waits
) -> None:
    stand_in.faults[SUBMIT].append(Fault(429, "slow down"))
    waits.then = lambda _: stand_in.add_foreign()
    assert run_cycle(direct).state is State.VALIDATED
    assert [row["miner_hotkey"] for row in stand_in.rows].count(HOTKEY) == 1


def test_an_emptied_database_gets_the_direct_submission_once_more(
    direct: Context, stand_in: StandIn, waits: Waits
) -> None:
    waits.then = lambda _: stand_in.wipe_once()
    stand_in.faults[SUBMIT].append(LOST)
    stand_in.faults[STATS].extend([Fault(502, "gateway")] * 3)
    assert run_cycle(direct).state is State.VALIDATED
    assert len(stand_in.rows) == 1


@pytest.mark.parametrize("told", ["2020-01-01T00:00:00", "some days ago"])
def test_an_earlier_row_of_the_same_claim_is_not_taken_for_this_one(
    direct: Context, stand_in: StandIn, told: str
) -> None:
    stand_in.verdict = None
    direct.waiter = Waits(stop_after(1))
    first = run_cycle(direct)
    assert first.state is State.REVEALED
    stand_in.rows[0]["created_at"] = told
    direct.journal.transition(first, replace(first, state=State.UNRANKED))
    stand_in.faults[SUBMIT].append(Fault(502, "gateway"))
    stop = stop_after(1)
    direct.waiter = Waits(lambda seconds: stop(seconds) if len(stand_in.rows) == 2 else None)
    second = run_cycle(direct)
    assert (second.state, second.submission_id) == (State.REVEALED, 2)


def test_a_clock_ahead_of_the_servers_hides_no_submission(
    direct: Context, stand_in: StandIn, url: str
) -> None:
    ahead = time.time() + 7200
    direct.now = lambda: ahead
    direct.client = ApiClient(url, direct.identity, now=direct.now)
    stand_in.faults[SUBMIT].append(LOST)
    assert run_cycle(direct).state is State.VALIDATED
    assert len(stand_in.rows) == 1
