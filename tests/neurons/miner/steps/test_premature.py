"""Premature commitments: validators judge them before their reveal, as the public service's do."""

import time

import pytest
from structlog.testing import capture_logs

from neurons.miner.command_line.status import read_status
from neurons.miner.context import Context
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle, run_forever, warn_at_start
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
)
from tests.neurons.miner.parts import SETTLED, Waits, states


@pytest.fixture
def fake_api() -> FakeValidatorApi:
    """The public service: validators judge unrevealed commitments, and the API shows no scores."""
    public = FakeValidatorApi(blocks_until_reveal=6)
    public.judges_early, public.shows_scores = True, False
    return public


@pytest.fixture
def patient(fake_api: FakeValidatorApi) -> FakeValidatorApi:
    """The public service, with validators that wait for the reveal."""
    fake_api.judges_early = False
    return fake_api


def ends(context: Context) -> list[tuple[str, State]]:
    """Return mode and state of every submission of the journal, oldest first."""
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
    assert fake_api.count(REVEAL) == 0  # an unmeasured claim does not enter the ranking
    assert [row["is_revealed"] for row in fake_api.rows] == [False, True]
    assert sum("judges commitments before" in row["event"] for row in logs) == 1
    status = read_status(context.settings.state_dir)
    assert "SUBMISSION_MODE=auto submits directly" in status.as_text()
    assert status.as_json()["judges_early_at"] > 0


def test_with_commit_reveal_a_premature_commitment_is_revealed(miner, fake_api):
    context = miner(submission_mode="commit_reveal")
    done = run_cycle(context)
    assert (done.state, done.rank, done.score) == (State.PREMATURE, 1, None)
    assert "nobody has measured" in str(done.reason)
    assert (fake_api.count(REVEAL), fake_api.count(SUBMIT)) == (1, 0)
    with capture_logs() as logs:
        warn_at_start(context)
    assert [row["log_level"] for row in logs] == ["warning"]


@pytest.mark.parametrize("mode", ["commit_reveal", "auto"])
def test_the_same_content_is_not_submitted_again_in_the_round(miner, fake_api, mode):
    intervals = iter(range(4))

    def then(seconds: float) -> None:
        if seconds == 5.0 and next(intervals, None) is None:
            raise Stopped("enough")

    run_forever(miner(submission_mode=mode, waiter=Waits(then)))
    assert (fake_api.count(COMMIT), fake_api.count(SUBMIT)) == (1, mode == "auto")


def test_a_commitment_may_be_premature_after_the_end_of_its_round(context, fake_api, waits):
    """The server still lists it as unrevealed."""
    waits.then = lambda _: setattr(fake_api, "round_id", 2)
    run_cycle(context)
    assert ends(context)[0] == ("commit_reveal", State.PREMATURE)
    assert fake_api.count(REVEAL) == 0


def test_before_reveal_is_pushed_before_its_direct_submission(miner, kernels):
    done = run_cycle(miner(publish_at="before_reveal"))
    assert (done.mode, done.state) == ("direct", State.RANKED)
    assert kernels.pushed == [done.commit_hash]


def test_a_verdict_before_the_first_poll_is_found_after_the_reveal(context, fake_api, waits, url):
    waits.then = lambda _: [row.update(validated=True) for row in fake_api.rows]
    fake_api.faults[STATS].extend([Fault(500, "down")] * 3)
    done = run_cycle(context)
    assert (done.mode, done.state) == ("commit_reveal", State.PREMATURE)
    assert context.journal.judges_early(url, time.time()) is not None
    assert fake_api.count(SUBMIT) == 0  # the reveal has entered the claim into the ranking


@pytest.mark.parametrize("lists_unrevealed", [True, False])
def test_a_verdict_after_the_reveal_is_not_premature(context, patient, lists_unrevealed):
    patient.lists_unrevealed = lists_unrevealed
    patient.faults[WEIGHTS].extend([Fault(500, "down")] * 9)  # they hide no rank
    done = run_cycle(context)
    assert (done.mode, done.state, done.rank) == ("commit_reveal", State.RANKED, 1)
    assert (done.weight, list(patient.faults[WEIGHTS])) == (0.6, [])
    assert context.journal.get(1).queued_at is not None
    assert State.PREMATURE not in states(context, 1)
    assert "whether it was measured is unknown" in str(done.reason)


def test_a_rank_without_a_sighting_in_the_queue_does_not_count(context, fake_api, waits):
    """It was judged before the first poll, and the reply to its reveal was lost."""
    fake_api.faults[REVEAL].append(LOST)
    waits.then = lambda _: [r.update(validated=True, judged_early=True) for r in fake_api.rows]
    fake_api.faults[STATS].extend([Fault(500, "down")] * 3)
    done = run_cycle(context)
    assert done.state is State.UNRANKED
    assert "never seen in the queue after its reveal" in str(done.reason)


def test_an_emptied_database_is_no_premature_verdict(context, patient, waits, url):
    waits.then = lambda _: patient.wipe_once() if patient.rows else None
    done = run_cycle(context)
    assert done.state is State.ABANDONED
    assert "lost it" in str(done.reason)
    assert context.journal.judges_early(url, time.time()) is None
    assert run_cycle(context).state is State.RANKED


def test_the_reveal_needs_no_list_of_unrevealed_commitments(context, patient):
    patient.blocks_until_reveal, patient.block = 0, 7
    patient.faults[PENDING].extend([Fault(500, "too many rows")] * 1000)
    patient.faults[REVEAL].append(Fault(425, "Cannot reveal yet. Wait 1 blocks (~0 minutes)"))
    assert run_cycle(context).state is State.RANKED
    assert patient.count(REVEAL) == 2


def test_two_submissions_of_a_hotkey_share_its_places_by_their_speed(context, patient, bench):
    """The weights name hotkeys, and two of one hotkey's submissions may be in the ranking."""
    first = run_cycle(context)
    others = [{"uid": 1, "hotkey": hotkey, "weight": 0.1} for hotkey in ("5Able", "5Other")]
    patient.judge = lambda row, score: row.update(validated=True)
    patient.weights = [others[0], *patient.weights, others[1]]
    second = run_cycle(context)  # a little faster, so that the only place is its
    assert (first.state, first.rank) == (State.RANKED, 1)
    assert float(second.tokens_per_sec or 0) > float(first.tokens_per_sec or 0)
    assert (second.state, second.rank, second.weight) == (State.RANKED, 2, 0.6)
    assert second.score is None
    bench.factor = 0.9  # slower than both
    assert run_cycle(context).state is State.UNRANKED


def test_a_submission_of_an_emptied_database_has_no_place_in_the_new_one(context, patient, bench):
    """Rounds start at 1 again; a faster submission of the old round 1 is not in the new one."""
    assert run_cycle(context).rank == 1
    patient.wipe()
    bench.factor = 0.9
    second = run_cycle(context)
    assert (second.state, second.rank, second.round_id) == (State.RANKED, 1, 1)


@pytest.mark.parametrize("emptied", [True, False])
def test_without_a_list_the_round_shows_whether_the_commitment_is_premature_or_lost(
    context, fake_api, kernels, url, emptied
):
    """It left the queue because of a validator, or with the whole database."""
    fake_api.judges_early = not emptied
    fake_api.faults[PENDING].extend([Fault(500, "too many rows")] * (30 if emptied else 1000))
    if emptied:
        kernels.on_verify = lambda: fake_api.wipe_once() if fake_api.rows else None
    run_cycle(context)
    assert context.journal.get(1).state is (State.ABANDONED if emptied else State.PREMATURE)
    assert (context.journal.judges_early(url, time.time()) is None) is emptied
    assert (fake_api.count(REVEAL) == 0) is not emptied


def test_a_premature_commitment_selects_direct_mode_for_the_length_of_a_round(miner, fake_api, url):
    """Anybody can mark a submission at the public API, so one mark must not count forever."""
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
    """Such a verdict may be premature: the public validator fetches five rows at once."""
    patient.shows_scores, patient.verdict = shows_scores, verdict
    first = run_cycle(context)
    assert (first.mode, first.state) == ("commit_reveal", state)
    patient.round_id, patient.verdict = 2, 1.0
    assert run_cycle(context).mode == ("direct" if sign else "commit_reveal")


def test_a_refusal_after_the_reveal_does_not_undo_it(miner, fake_api):
    context = miner(submission_mode="commit_reveal")
    fake_api.lists_unrevealed = False  # polls before the reveal show nothing

    def judge() -> None:
        fake_api.rows[0].update(validated=True)
        fake_api.faults[ROUND].append(Fault(400, "no"))

    fake_api.after[REVEAL] = judge
    done = run_cycle(context)
    assert fake_api.count(REVEAL) == 1
    assert not fake_api.faults[ROUND]
    assert not {State.FAILED, State.HELD} & set(states(context, done.id))


def test_a_failed_second_poll_is_no_premature_verdict(context, patient, waits):
    """The first poll after the reveal reads an outdated list without the submission."""

    def show(_: float) -> None:
        if patient.count(REVEAL) and patient.rows[0]["validated"] and not patient.weights:
            patient.rows[0].update(validated=False)
            patient.faults[STATS].extend([Fault(500, "down")] * 3)

    patient.after[REVEAL] = lambda: patient.rows[0].update(validated=True)
    waits.then = show
    done = run_cycle(context)
    assert (done.mode, done.state, done.rank) == ("commit_reveal", State.RANKED, 1)
    assert not patient.faults[STATS]
    assert done.judged_early_at is None
