"""A stop signal before and after each transition and request: the miner ends in an orderly way."""

import signal
from itertools import cycle
from pathlib import Path

import pytest

from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle
from neurons.runtime.process import STOP_SIGNALS, Stopped, stop_on_signals
from tests.faults.state.crash_child import watched_miner
from tests.faults.state.test_crash import MOMENTS
from tests.neurons.fake_validator_api import FakeValidatorApi
from tests.neurons.miner.parts import Waits, make_context
from tests.processes import HANG


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize(("moment", "number"), [*zip(MOMENTS, cycle(STOP_SIGNALS), strict=False)])
def test_row_15_after_a_stop_in_any_state_a_start_continues(
    tmp_path: Path, url: str, fake_api: FakeValidatorApi, moment: str, number: signal.Signals
) -> None:
    reached: set[str] = set()

    def stop(when: str, what: str) -> None:
        if context.stop.is_set():  # a second signal would end this process
            reached.update({what} & set(State.__members__))
        elif f"{when}:{what}" == moment:
            signal.raise_signal(number)
            assert context.stop.wait(HANG)

    def wait(_: float) -> None:
        if context.stop.is_set():
            raise Stopped("stop requested")

    context = watched_miner(tmp_path, url, stop, waiter=Waits(wait))
    with stop_on_signals(context.stop):
        left = run_cycle(context)
    context.journal.close()
    assert context.stop.is_set()
    assert len(reached) <= 2  # the state in -ING and the state of the running step
    assert left.state is not State.FAILED

    done = run_cycle(make_context(tmp_path, url))
    # After the last moment the submission is closed, so the next start makes a new one.
    assert done.id == (2 if left.state is State.VALIDATED else left.id)
    assert done.state is State.VALIDATED
    assert len(fake_api.rows) == done.id
    assert fake_api.count("/commit_submission") == fake_api.count("/reveal_submission") == done.id
