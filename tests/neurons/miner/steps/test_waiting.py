"""How long the steps wait, how often they ask and what they say meanwhile."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from neurons.miner.context import Context
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle
from neurons.runtime.process import Stopped
from neurons.wire.client import ApiClient
from neurons.wire.rules import block_at
from tests.neurons.fake_validator_api import (
    COMMIT,
    LOST,
    PENDING,
    REVEAL,
    ROUND,
    SUBMIT,
    FakeValidatorApi,
    Fault,
    serve,
)
from tests.neurons.miner.parts import Miner, Waits, stop_after

SINCE_BOOT = 50_000.0
"""What a monotonic clock may show at first."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock of the steps that wait, as its only entry."""
    shown = [SINCE_BOOT]
    module = SimpleNamespace(monotonic=lambda: shown[0])
    for step in ("follow", "commit"):
        monkeypatch.setattr(f"neurons.miner.steps.{step}.time", module)
    return shown


@pytest.fixture
def revealed(context: Context, fake_api: FakeValidatorApi) -> None:
    """A submission that waits for its verdict."""
    fake_api.verdict = None
    context.waiter = Waits(stop_after(2))
    assert run_cycle(context).state is State.REVEALED


@pytest.mark.usefixtures("revealed")
def test_a_long_wait_is_logged_every_ten_minutes_and_the_round_read_every_five(
    context: Context, fake_api: FakeValidatorApi, clock: list[float]
) -> None:
    asked, stop, looks = fake_api.count(ROUND), stop_after(21), []

    def a_minute_passes(seconds: float) -> None:
        looks.append(fake_api.count(ROUND) - asked)
        clock[0] += 60.0
        stop(seconds)

    context.waiter = Waits(a_minute_passes)
    with capture_logs() as logs:
        run_cycle(context)
    assert looks == [1 + minute // 5 for minute in range(21)]
    said = [row for row in logs if row["event"] == "queued for a validator"]
    assert [row["queue"] for row in said] == [1, 1, 1]  # at 0, 10 and 20 minutes


@pytest.mark.usefixtures("revealed")
def test_the_round_is_read_after_forty_looks_without_result_and_then_every_five_minutes(
    context: Context, fake_api: FakeValidatorApi, clock: list[float]
) -> None:
    asked: list[int] = []

    def a_quarter_of_a_minute_passes(_: float) -> None:
        asked.append(fake_api.count(ROUND))
        clock[0] += 15.0
        if len(asked) == 1:
            fake_api.add_foreign(tokens_per_sec=float("nan"))  # breaks the statistics
        if len(asked) == 71:
            fake_api.judge(fake_api.rows[0], 1.0)

    context.waiter = Waits(a_quarter_of_a_minute_passes)
    assert run_cycle(context).state is State.RANKED
    rises = [look for look in range(1, len(asked)) if asked[look] > asked[look - 1]]
    assert rises == [40, 60]  # looks that told nothing before, and the one that did
    assert len(asked) == 80


def test_the_wait_for_the_block_is_most_of_what_is_left_and_a_minute_at_most(
    context: Context, fake_api: FakeValidatorApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 12 s, two a look; a server elsewhere is asked every 15 s at most."""
    fake_api.blocks_until_reveal = 60

    def another_block(_: float) -> None:
        fake_api.block += 1

    waits = Waits(another_block)
    context.waiter = waits
    monkeypatch.setattr(context.client, "on_loopback", False)
    with capture_logs() as logs:
        assert run_cycle(context).state is State.VALIDATED
    said = [row for row in logs if row["event"] == "waiting for the reveal block"]
    assert [(row["blocks_left"], row["minutes_left"]) for row in said] == [
        *((59, 12), (33, 7), (7, 1)),
    ]
    assert {row["reveal_block"] for row in said} == {1060}
    blocks = [60.0] * 27 + [48.0, 28.8, 15.0]
    assert waits.seconds[: len(blocks)] == pytest.approx(blocks)


def test_a_queue_that_cannot_be_read_behind_the_reveal_is_looked_at_four_times(
    context: Context, fake_api: FakeValidatorApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second apart; then the reveal counts, and what comes of it is followed."""
    fake_api.add_foreign(tokens_per_sec=float("nan"))  # breaks the statistics for everybody

    def follows(seconds: float) -> None:
        if fake_api.count(REVEAL) and seconds != 1.0:
            raise Stopped("enough")

    waits = Waits(follows)
    context.waiter = waits
    monkeypatch.setattr(context.client, "on_loopback", False)
    assert run_cycle(context).state is State.REVEALED
    assert waits.seconds.count(1.0) == 4


@pytest.mark.parametrize(("earlier", "state"), [(3.0, State.VALIDATED), (8.0, State.UNRANKED)])
def test_a_row_of_some_seconds_before_the_submission_may_be_it(
    miner: Miner, fake_api: FakeValidatorApi, url: str, earlier: float, state: State
) -> None:
    """The server's clock is known to a few seconds; who is older than that is another one."""
    context = miner(submission_mode="direct")
    context.now = lambda: time.time() + 7200  # this machine's clock is two hours ahead
    context.client = ApiClient(url, context.identity, now=context.now)
    fake_api.clock = lambda: time.time() - earlier
    fake_api.faults[SUBMIT].append(LOST)
    done = run_cycle(context)
    assert (done.state, fake_api.count(SUBMIT)) == (state, 1)


def test_a_commitment_that_the_server_holds_and_does_not_list_is_looked_for_two_minutes(
    context: Context, fake_api: FakeValidatorApi, clock: list[float]
) -> None:
    looks, pauses = [], iter([119.5, 0.5])
    fake_api.faults[COMMIT].append(Fault(409, "Commitment hash already exists."))

    def time_passes(_: float) -> None:
        looks.append(clock[0] - SINCE_BOOT)
        clock[0] += next(pauses)

    context.waiter = Waits(time_passes)
    held = run_cycle(context)
    assert held.state is State.HELD
    assert "does not list it" in str(held.reason)
    assert looks == [0.0, 119.5]
    assert fake_api.count(PENDING) == 3


def test_where_no_list_tells_the_block_it_is_waited_for_by_the_servers_clock(
    context: Context, fake_api: FakeValidatorApi
) -> None:
    clock = [float(int(time.time()))]
    fake_api.block, fake_api.blocks_until_reveal = block_at(clock[0]), 6
    fake_api.faults[PENDING].extend([Fault(500, "too many rows")] * 1000)

    def time_passes(_: float) -> None:
        clock[0] += 1.0
        fake_api.block = block_at(clock[0])

    context.waiter = Waits(time_passes)
    with serve(fake_api, date="soon") as address:
        context.client = ApiClient(address, context.identity, now=lambda: clock[0])
        assert run_cycle(context).state is State.VALIDATED
        context.client.close()
    assert fake_api.count(REVEAL) == 1  # at the block, or it would have been too early


def test_when_it_was_first_seen_in_the_queue_is_kept(
    miner: Miner, fake_api: FakeValidatorApi
) -> None:
    context = miner(submission_mode="direct")
    fake_api.verdict = None
    began, seen = time.time(), []
    for moment in (began, began + 60):
        context.now = lambda now=moment: now  # type: ignore[misc]
        context.waiter = Waits(stop_after(2))
        seen.append(run_cycle(context).queued_at)
    assert seen == [began, began]


@pytest.mark.parametrize(("earlier", "state"), [(3.0, State.VALIDATED), (8.0, State.UNRANKED)])
def test_the_clock_of_a_server_without_a_date_is_taken_to_be_right(
    miner: Miner, fake_api: FakeValidatorApi, earlier: float, state: State
) -> None:
    context, began = miner(submission_mode="direct"), float(int(time.time()))
    context.now, fake_api.clock = (lambda: began), (lambda: began - earlier)
    fake_api.faults[SUBMIT].append(LOST)
    with serve(fake_api, date="soon") as address:
        context.client = ApiClient(address, context.identity)
        done = run_cycle(context)
        context.client.close()
    assert (done.state, fake_api.count(SUBMIT)) == (state, 1)
