"""The validator API moves to another host while a submission is under way."""

from __future__ import annotations

import pytest

from neurons.miner.context import Context
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle
from neurons.runtime.process import Stopped
from tests.neurons.fake_validator_api import COMMIT, REVEAL, Fault
from tests.neurons.miner.parts import Miner

OLD = "https://old.example"


def move(context: Context) -> None:
    """Let the journal have been written with another address of the API."""
    context.journal.move_api(context.client.base_url, OLD)


def run_until(context: Context, state: State) -> Context:
    """Run a cycle that stops when its submission reaches `state`, at the API's old address."""
    journalled = context.journal.transition

    def transition(before, after, **options):
        result = journalled(before, after, **options)
        if after.state is state:
            raise Stopped("enough")
        return result

    context.journal.transition = transition  # type: ignore[method-assign]
    assert run_cycle(context).state is state
    context.journal.transition = journalled  # type: ignore[method-assign]
    move(context)
    return context


@pytest.mark.parametrize(
    "state",
    [State.PUBLISHED, State.CLAIMED, State.COMMITTING, State.COMMITTED, State.REVEALING],
)
def test_a_submission_goes_on_at_the_api_s_new_address(context, fake_api, state):
    run_until(context, state)
    if state is State.COMMITTING:  # its request arrived, and the reply was lost
        context.client.commit(str(context.journal.get(1).commitment_hash), 2048, 1)
    done = run_cycle(context)
    assert (done.state, done.api_url) == (State.VALIDATED, context.client.base_url), done.reason
    assert (fake_api.count(COMMIT), len(fake_api.rows)) == (1, 1)
    assert context.journal.foreign(done.hotkey, done.api_url, 0.0) == []


def test_a_revealed_submission_is_followed_by_its_row_in_the_queue(context, fake_api):
    fake_api.verdict = None
    run_until(context, State.REVEALED)
    fake_api.verdict = 1.0
    assert run_cycle(context).state is State.VALIDATED


CHANGES = {
    "another number": {"id": 99},
    "another block": {"reveal_block": 7},
    "another hash": {"commitment_hash": "e" * 64},
    "another hotkey": {"miner_hotkey": "5Other"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_api_is_not_taken_for_a_new_address(context, fake_api, name):
    run_until(context, State.COMMITTED)
    fake_api.rows[0].update(CHANGES[name])
    held = run_cycle(context)
    assert (held.state, held.api_url) == (State.HELD, OLD)
    assert "which does not list it" in str(held.reason)
    assert "Set VALIDATOR_API_URL to an address of the same API" in str(held.remedy)
    assert fake_api.count(REVEAL) == 0


def test_an_unreadable_list_at_the_new_address_is_retried(context, fake_api):
    run_until(context, State.COMMITTED)
    fake_api.faults["/pending_reveals"].append(Fault(200, b"<html>parked</html>"))
    done = run_cycle(context)
    assert (done.state, done.attempts) == (State.VALIDATED, 0), done.reason
    notes = [row[0] for row in context.journal._database.execute("SELECT note FROM events")]
    assert any("whose lists cannot be read" in str(note) for note in notes), notes


def test_earlier_submissions_at_the_old_address_are_not_foreign(miner: Miner, fake_api, kernels):
    first = miner()
    assert run_cycle(first).state is State.VALIDATED
    kernels.content = "kernel 2\n"
    done = run_cycle(run_until(first, State.COMMITTED))
    assert done.state is State.VALIDATED, done.reason
    assert first.journal.foreign(done.hotkey, done.api_url, 0.0) == []
