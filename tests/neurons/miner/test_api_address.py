"""The API moves to another host, or its address belongs to another service."""

from contextlib import closing

import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from neurons.miner.__main__ import _once
from neurons.miner.context import Context
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle, run_forever
from neurons.runtime.errors import ConfigError
from neurons.runtime.process import Stopped
from neurons.wire.client import ApiClient
from tests.neurons.fake_validator_api import COMMIT, REVEAL, Fault
from tests.neurons.miner.parts import Key, Miner, stop_after
from tests.servers import serving_app

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


STATES = (State.PUBLISHED, State.CLAIMED, State.COMMITTING, State.COMMITTED)


@pytest.mark.parametrize("state", [*STATES, State.REVEALING, State.REVEALED])
def test_a_submission_goes_on_at_the_api_s_new_address(context, fake_api, state):
    fake_api.verdict = None
    run_until(context, state)
    fake_api.verdict = 1.0
    if state is State.COMMITTING:  # its request arrived, and the reply was lost
        context.client.commit(str(context.journal.get(1).commitment_hash), 2048, 1)
    done = run_cycle(context)
    assert (done.state, done.api_url) == (State.VALIDATED, context.client.base_url), done.reason
    assert (fake_api.count(COMMIT), len(fake_api.rows)) == (1, 1)
    assert context.journal.foreign(done.hotkey, done.api_url, 0.0) == []


def test_a_judged_submission_is_followed_by_its_round(context, fake_api):
    fake_api.shows_scores = False
    run_until(context, State.REVEALED)
    fake_api.judge(fake_api.rows[0], 1.0)
    done = run_cycle(context)
    assert (done.closed, done.api_url) == (True, context.client.base_url), done.reason


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
    assert (held.state, held.api_url, fake_api.count(REVEAL)) == (State.HELD, OLD, 0)
    assert "which does not list it" in str(held.reason)
    assert "Set VALIDATOR_API_URL to an address of the same API" in str(held.remedy)


def test_an_unreadable_list_at_the_new_address_is_retried(context, fake_api):
    run_until(context, State.COMMITTED)
    fake_api.faults["/pending_reveals"].append(Fault(200, b"<html>parked</html>"))
    done = run_cycle(context)
    assert (done.state, done.attempts) == (State.VALIDATED, 0), done.reason
    notes = [row[0] for row in context.journal._database.execute("SELECT note FROM events")]
    assert any("its lists cannot be read" in str(note) for note in notes), notes


def test_earlier_submissions_at_the_old_address_are_not_foreign(miner: Miner, fake_api, kernels):
    first = miner()
    assert run_cycle(first).state is State.VALIDATED
    kernels.content = "kernel 2\n"
    done = run_cycle(run_until(first, State.COMMITTED))
    assert done.state is State.VALIDATED, done.reason
    assert first.journal.foreign(done.hotkey, done.api_url, 0.0) == []


ABSENT = (404, "Not Found")


def test_a_daemon_waits_for_an_api_that_serves_the_competition(miner, fake_api, waits):
    """It starts nothing, logs once an hour, and goes on when the competition is back."""
    fake_api.commit_route = ABSENT
    context = miner()

    def then(_: float) -> None:
        if len(waits.seconds) == 100:
            assert context.journal.latest() == []
            assert {request.method for request in fake_api.requests} == set()
            fake_api.commit_route = (405, "Method Not Allowed")
        if any(one.closed for one in context.journal.latest()):
            raise Stopped("enough")

    waits.then = then
    with capture_logs() as logs:
        run_forever(context)
    about = [row for row in logs if "does not serve this competition" in row["event"]]
    assert len(about) == 1, about
    assert context.journal.latest()[0].state is State.VALIDATED


def test_a_live_commitment_is_revealed_to_a_service_without_the_route(context, fake_api):
    run_until(context, State.COMMITTED)
    fake_api.commit_route = ABSENT
    assert run_cycle(context).state is State.VALIDATED


def test_a_claim_waits_an_hour_for_the_competition(miner, fake_api, waits):
    context = run_until(miner(), State.CLAIMED)
    fake_api.commit_route = ABSENT
    waits.then = stop_after(1)
    waiting = run_cycle(context)
    assert (waiting.state, fake_api.count(COMMIT)) == (State.FAILED, 0)
    assert "does not serve this competition" in str(waiting.reason)
    assert waits.seconds[-1] >= 3590, waits.seconds


@pytest.mark.parametrize("status", [200, 301, 403, 500])
def test_other_replies_about_the_route_do_not_stop_the_miner(context, fake_api, status):
    fake_api.commit_route = (status, "whatever")
    assert context.client.serves_competition() is None
    assert run_cycle(context).state is State.VALIDATED


def test_once_says_that_the_api_does_not_serve_the_competition(context, fake_api):
    fake_api.commit_route = ABSENT
    with pytest.raises(ConfigError, match="does not serve this competition"):
        _once(context, embedded=False)
    assert context.journal.latest() == []


def test_this_project_s_own_api_serves_the_competition(api) -> None:
    with closing(ApiClient(api.url, Key())) as client:
        assert client.serves_competition() is True
    with serving_app(FastAPI()) as url, closing(ApiClient(url, Key())) as client:
        assert client.serves_competition() is False
    with closing(ApiClient("http://127.0.0.1:9", Key())) as client:
        assert client.serves_competition() is None
