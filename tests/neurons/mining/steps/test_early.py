"""Validators that judge commitments before their reveal, as the public service's own do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from neurons.command_line.status import read_status
from neurons.mining.cycle import State, Submission
from neurons.mining.daemon import run_cycle, run_forever
from neurons.mining.early import warn_of_early_judgement
from neurons.processes.runtime import Stopped
from tests.neurons.mining.parts import (
    HOTKEY,
    StandInBench,
    StandInFork,
    Waits,
    make_context,
    states,
    stop_after,
)
from tests.neurons.stand_in import LOST, Fault, StandIn, serve

COMMIT, REVEAL, SUBMIT = "/commit_submission", "/reveal_submission", "/submit_kernel"
STATS, PENDING, ROUND = "/get_submission_stats", "/pending_reveals", "/get_current_round"


@pytest.fixture
def stand_in() -> StandIn:
    """The public service: its validators judge what they see, its API shows no scores."""
    public = StandIn(blocks_until_reveal=6)
    public.judges_early, public.shows_scores = True, False
    return public


def ends(context: Any) -> list[tuple[str, State]]:
    """Return how every submission of the journal was sent and where it stands, oldest first."""
    rows: list[Submission] = context.journal.latest(100)
    return [(row.mode, row.state) for row in reversed(rows)]


def test_auto_submits_the_same_claim_directly_in_the_same_round(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    bench = StandInBench()
    context = make_context(tmp_path / "state", url, measure=bench)
    with capture_logs() as logs:
        done = run_cycle(context)
    assert ends(context) == [
        ("commit_reveal", State.PREMATURE),
        ("direct", State.RANKED),
    ]
    early, direct = context.journal.get(1), context.journal.get(2)
    assert done == direct
    assert (direct.rank, direct.score) == (1, None)
    assert "no scores" in str(direct.reason)
    assert (direct.tokens_per_sec, direct.round_id) == (early.tokens_per_sec, early.round_id)
    assert bench.calls == [512, 1024, 2048]  # the claim was measured once
    assert stand_in.count(REVEAL) == 0  # what nobody measured is not put into the ranking
    assert [row["is_revealed"] for row in stand_in.rows] == [False, True]
    assert sum("judges commitments before" in row["event"] for row in logs) == 1


def test_from_then_on_this_api_gets_direct_submissions(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    run_cycle(make_context(tmp_path / "state", url))
    context = make_context(tmp_path / "state", url)
    stand_in.round_id = 2
    assert run_cycle(context).mode == "direct"
    assert stand_in.count(COMMIT) == 1
    assert stand_in.count(SUBMIT) == 2


def test_status_shows_what_the_api_was_seen_to_do(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    state = tmp_path / "state"
    run_cycle(make_context(state, url))
    status = read_status(state)
    assert "judges commitments before their reveal" in status.as_text()
    assert "SUBMISSION_MODE=auto submits directly" in status.as_text()
    assert status.as_json()["judges_early_at"] > 0
    stand_in.judges_early = False
    with serve(stand_in) as elsewhere:
        other = tmp_path / "other"
        run_cycle(make_context(other, elsewhere))
        assert "judges commitments" not in read_status(other).as_text()


def test_another_api_is_not_held_responsible(tmp_path: Path, url: str, stand_in: StandIn) -> None:
    context = make_context(tmp_path / "state", url)
    context.journal.note_early_judgement("https://elsewhere.example", 1.0)
    context.waiter = Waits(stop_after(1))
    assert run_cycle(context).mode == "commit_reveal"


def test_commit_reveal_that_is_insisted_on_is_revealed_and_called_what_it_is(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    context = make_context(tmp_path / "state", url, flags={"submission_mode": "commit_reveal"})
    done = run_cycle(context)
    assert (done.state, done.rank, done.score) == (State.PREMATURE, 1, None)
    assert "nobody has measured" in str(done.reason)
    assert stand_in.count(REVEAL) == 1
    assert stand_in.count(SUBMIT) == 0
    with capture_logs() as logs:
        warn_of_early_judgement(make_context(tmp_path / "state", url, flags=FLAGS["insist"]))
    assert [row["log_level"] for row in logs] == ["warning"]


FLAGS: dict[str, dict[str, Any]] = {
    "insist": {"submission_mode": "commit_reveal"},
    "auto": {"submission_mode": "auto"},
}


@pytest.mark.parametrize("mode", FLAGS)
def test_the_same_content_is_not_submitted_again_in_the_round(
    tmp_path: Path, url: str, stand_in: StandIn, mode: str
) -> None:
    intervals = iter(range(4))

    def then(seconds: float) -> None:
        if seconds == 5.0 and next(intervals, None) is None:
            raise Stopped("enough")

    context = make_context(tmp_path / "state", url, flags=FLAGS[mode], waiter=Waits(then))
    run_forever(context)
    assert stand_in.count(COMMIT) == 1
    assert stand_in.count(SUBMIT) == (mode == "auto")


def test_before_reveal_is_pushed_before_its_direct_submission(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    fork = StandInFork(tmp_path / "fork")
    flags = {"publish_at": "before_reveal"}
    done = run_cycle(make_context(tmp_path / "state", url, fork=fork, flags=flags))
    assert (done.mode, done.state) == ("direct", State.RANKED)
    assert fork.pushed == [done.commit_hash]


def test_a_row_that_was_judged_before_the_first_look_is_noticed_after_the_reveal(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    def judge_at_once(seconds: float) -> None:
        for row in stand_in.rows:
            row["validated"] = True

    stand_in.faults[STATS].append(Fault(500, "down"))
    stand_in.faults[STATS].extend([Fault(500, "down")] * 2)
    context = make_context(tmp_path / "state", url, waiter=Waits(judge_at_once))
    done = run_cycle(context)
    assert (done.mode, done.state) == ("commit_reveal", State.PREMATURE)
    assert context.journal.judges_early(url) is not None
    assert stand_in.count(SUBMIT) == 0  # the reveal put a claim of this round into the ranking


def test_a_verdict_after_the_reveal_is_no_early_one(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    stand_in.judges_early = False
    context = make_context(tmp_path / "state", url)
    done = run_cycle(context)
    assert (done.mode, done.state, done.rank) == ("commit_reveal", State.RANKED, 1)
    assert context.journal.get(1).queued_at is not None
    assert context.journal.judges_early(url) is None


def test_a_reveal_whose_reply_was_lost_may_have_been_judged_since(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    """The second reveal is answered with 409; nobody can tell when a validator took it."""
    stand_in.judges_early = False
    stand_in.faults[REVEAL].append(LOST)

    def judge(_: float) -> None:
        for row in stand_in.rows:
            if row["is_revealed"] and not row["validated"]:
                stand_in.judge(row, 1.0)

    done = run_cycle(make_context(tmp_path / "state", url, waiter=Waits(judge)))
    assert done.state is State.UNRANKED
    assert "may have been judged before" in str(done.reason)
    assert done.judged_early_at is None


def test_a_look_that_failed_behind_the_reveal_is_made_again(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    """Judged while a look before the reveal hung: the first look behind it cannot be read."""
    waits = Waits()
    context = make_context(tmp_path / "state", url, flags=FLAGS["insist"], waiter=waits)
    stand_in.judges_early = False
    check = context.fork.verify

    def judge_meanwhile(commit: str) -> None:
        check(commit)
        if stand_in.rows:
            stand_in.faults[STATS].extend([Fault(500, "down")] * 6)
            for row in stand_in.rows:
                row["validated"] = row["judged_early"] = True

    context.fork.verify = judge_meanwhile  # type: ignore[method-assign]
    done = run_cycle(context)
    assert (done.state, done.rank) == (State.PREMATURE, 1)


def test_a_rank_of_what_was_never_seen_in_the_queue_is_not_believed(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    """Judged before the first look, and the reply to its reveal lost: nobody knows when."""
    stand_in.faults[REVEAL].append(LOST)

    def judge_at_once(_: float) -> None:
        for row in stand_in.rows:
            row["validated"] = row["judged_early"] = True

    stand_in.faults[STATS].extend([Fault(500, "down")] * 3)
    done = run_cycle(make_context(tmp_path / "state", url, waiter=Waits(judge_at_once)))
    assert done.state is State.UNRANKED
    assert "never seen in the queue after its reveal" in str(done.reason)


def test_a_server_that_hides_commitments_is_no_early_judge(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    stand_in.judges_early, stand_in.lists_unrevealed = False, False
    context = make_context(tmp_path / "state", url)
    assert run_cycle(context).state is State.RANKED
    assert context.journal.get(1).queued_at is not None  # once it was revealed
    assert context.journal.judges_early(url) is None


def test_a_database_that_was_emptied_is_no_early_judge(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    def wipe(seconds: float) -> None:
        if stand_in.rows and stand_in.databases == 1:
            stand_in.wipe()

    stand_in.judges_early = False
    context = make_context(tmp_path / "state", url, waiter=Waits(wipe))
    done = run_cycle(context)
    assert done.state is State.ABANDONED
    assert "lost it" in str(done.reason)
    assert context.journal.judges_early(url) is None
    assert run_cycle(context).state is State.RANKED


def test_a_crash_between_seeing_and_ending_it_ends_it_at_the_next_start(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    context = make_context(tmp_path / "state", url, waiter=Waits(stop_after(1)))
    committed = run_cycle(context)
    assert committed.state is State.COMMITTED
    context.note(context.journal.get(1), judged_early_at=5.0)
    context.journal.note_early_judgement(url, 5.0)
    context.journal.close()
    again = make_context(tmp_path / "state", url)
    assert run_cycle(again).state is State.RANKED
    assert ends(again)[0] == ("commit_reveal", State.PREMATURE)
    assert stand_in.count(REVEAL) == 0


def test_a_list_of_open_commitments_that_cannot_be_read_delays_nothing(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    stand_in.judges_early = False
    stand_in.blocks_until_reveal, stand_in.block = 0, 7
    stand_in.faults[PENDING].extend([Fault(500, "too many rows")] * 1000)
    stand_in.faults[REVEAL].append(Fault(425, "Cannot reveal yet. Wait 1 blocks (~0 minutes)"))
    done = run_cycle(make_context(tmp_path / "state", url))
    assert done.state is State.RANKED
    assert stand_in.count(REVEAL) == 2


def test_the_place_of_an_earlier_submission_is_not_taken_for_this_ones(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    """The weights name hotkeys: two of one hotkey's submissions may be in the ranking."""
    stand_in.judges_early = False
    bench = StandInBench()
    context = make_context(tmp_path / "state", url, measure=bench)
    first = run_cycle(context)
    others = [{"uid": n, "hotkey": f"5Other{n}", "weight": 0.1} for n in range(3)]
    stand_in.judge = lambda row, score: row.update(validated=True)  # type: ignore[method-assign]
    stand_in.weights = [others[0], *stand_in.weights, others[1]]
    second = run_cycle(context)  # a little faster: one place is its, and the first has none
    assert (first.state, first.rank) == (State.RANKED, 1)
    assert float(second.tokens_per_sec or 0) > float(first.tokens_per_sec or 0)
    assert (second.state, second.rank) == (State.RANKED, 2)
    bench.calls.clear()  # slower again than both
    third = run_cycle(context)
    assert third.state is State.UNRANKED


def test_rank_comes_from_the_weights_and_is_no_validation(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    def judge(row: dict[str, Any], score: float) -> None:
        row["validated"] = True
        stand_in.weights = [
            {"uid": 1, "hotkey": "5Other", "weight": 0.6},
            {"uid": 0, "hotkey": HOTKEY, "weight": 0.25},
        ]

    stand_in.judges_early = False
    stand_in.judge = judge  # type: ignore[method-assign]
    done = run_cycle(make_context(tmp_path / "state", url))
    assert (done.state, done.rank, done.weight, done.score) == (State.RANKED, 2, 0.25, None)
    assert states(make_context(tmp_path / "state", url), done.id)[-1] is State.RANKED
