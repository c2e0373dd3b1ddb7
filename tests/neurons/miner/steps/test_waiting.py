"""Clocks: the age of the server's rows, and its block without a list."""

from __future__ import annotations

import time

import pytest

from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle
from neurons.wire.client import ApiClient
from neurons.wire.rules import block_at
from tests.neurons.fake_validator_api import (
    LOST,
    PENDING,
    REVEAL,
    SUBMIT,
    FakeValidatorApi,
    Fault,
    serve,
)
from tests.neurons.miner.parts import Miner, Waits


@pytest.mark.parametrize(("earlier", "state"), [(3.0, State.VALIDATED), (8.0, State.UNRANKED)])
def test_a_row_of_some_seconds_before_the_submission_may_be_it(
    miner: Miner, fake_api: FakeValidatorApi, url: str, earlier: float, state: State
) -> None:
    """The server's clock is known to 5 seconds; an older row is another submission."""
    context = miner(submission_mode="direct")
    context.now = lambda: time.time() + 7200  # this machine's clock is two hours ahead
    context.client = ApiClient(url, context.identity, now=context.now)
    fake_api.clock = lambda: time.time() - earlier
    fake_api.faults[SUBMIT].append(LOST)
    done = run_cycle(context)
    assert (done.state, fake_api.count(SUBMIT)) == (state, 1)


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
