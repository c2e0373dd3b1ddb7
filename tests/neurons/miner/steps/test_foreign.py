"""Foreign submissions: two state folders send submissions of one hotkey."""

import pytest
from structlog.testing import capture_logs

from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle
from tests.neurons.fake_validator_api import LOST, SUBMIT, FakeValidatorApi
from tests.neurons.miner.parts import HOTKEY, Miner, Waits, make_context, stop_after

WARNING = "the API holds submissions of this hotkey that this state folder did not send"


@pytest.fixture
def fake_api() -> FakeValidatorApi:
    """The public service, whose API shows no scores and whose weights name hotkeys."""
    public = FakeValidatorApi()
    public.shows_scores = False
    return public


def warnings(logs: list) -> list[list[int]]:
    return [row["submission_ids"] for row in logs if row["event"] == WARNING]


def test_a_foreign_submission_is_reported_and_its_rank_left_out(context, fake_api, url, tmp_path):
    other = make_context(tmp_path / "other", url, waiter=Waits(stop_after(1)))
    assert run_cycle(other).state is State.COMMITTED
    with capture_logs() as logs:
        done = run_cycle(context)
    assert warnings(logs) == [[1]]
    assert (done.state, done.rank) == (State.UNRANKED, None)
    assert "did not send (1)" in str(done.reason)
    assert fake_api.weights == [{"uid": 0, "hotkey": HOTKEY, "weight": 0.6}]


def test_submissions_of_a_lost_state_folder_are_foreign(miner: Miner, fake_api) -> None:
    context = miner(waiter=Waits(stop_after(1)))
    assert run_cycle(context).state is State.COMMITTED
    context.journal.close()
    for file in context.settings.state_dir.glob("journal.sqlite*"):
        file.unlink()
    with capture_logs() as logs:
        run_cycle(miner())
    assert warnings(logs) == [[1]]


def test_own_submissions_are_not_foreign(miner: Miner, fake_api: FakeValidatorApi) -> None:
    """Neither earlier ones, nor those of other targets, nor one whose reply was lost."""
    with capture_logs() as logs:
        run_cycle(miner())
        run_cycle(miner(target_sequence_length=1024))
        fake_api.faults[SUBMIT].append(LOST)
        done = run_cycle(miner(submission_mode="direct"))
    assert warnings(logs) == []
    assert done.rank == 1


def test_rows_of_earlier_rounds_are_not_foreign(context, fake_api):
    """The public list of the fastest shows rows of all rounds, also of earlier installations."""
    row = {"id": 99, "miner_hotkey": HOTKEY, "tokens_per_sec": 9e9}
    row |= {"target_sequence_length": 2048, "created_at": "2025-12-31T00:00:00"}
    fake_api.performers.append(row)
    with capture_logs() as logs:
        assert run_cycle(context).rank == 1
    assert warnings(logs) == []
