"""Whole cycles against this project's own API, with real signatures and verdicts."""

from pathlib import Path
from typing import Any

import pytest

from neurons.miner.context import Context
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle
from neurons.wire.client import ApiClient
from tests.neurons import live_api
from tests.neurons.live_api import ALICE, Hotkey, LiveApi
from tests.neurons.miner.parts import FakeBench, FakeFork, Waits, make_context


def miner(
    folder: Path, api: LiveApi, waits: Waits, mode: str = "commit_reveal", **parts: Any
) -> Context:
    """Return a miner with a real hotkey; each of its waits lets one block pass."""
    client = ApiClient(api.url, ALICE, wait=waits)
    parts |= {"identity": ALICE, "client": client, "waiter": waits, "submission_mode": mode}
    return make_context(folder, api.url, **parts)


def marking(api: LiveApi, score: float) -> Waits:
    """Return waits at each of which a block passes and a validator marks all queued rows."""

    def pass_time(_: float) -> None:
        api.pass_blocks(1)
        for row in api.get("/get_submission_stats")["recent_submissions"]:
            api.mark(row["id"], score)

    return Waits(pass_time)


@pytest.mark.parametrize(
    ("mode", "score", "state"),
    [("commit_reveal", 0.95, State.VALIDATED), ("direct", 0.0, State.REJECTED)],
)
def test_a_cycle_reaches_its_verdict(tmp_path, api, mode, score, state):
    done = run_cycle(miner(tmp_path / "state", api, marking(api, score), mode))
    assert done.state is state
    assert (done.score, done.rank) == (score, 1 if score else None)
    assert (done.weight, done.fork_url) == (0.6 if score else None, FakeFork(tmp_path).url)


def test_the_miner_shows_its_place_in_the_queue(tmp_path: Path, api: LiveApi) -> None:
    """Two others are older; one has its verdict, and the second 90 s later."""
    waits = Waits()
    context = miner(tmp_path / "state", api, waits)
    others = [Hotkey(f"//Other{n}") for n in range(3)]
    rows = []
    for key in others:
        api.register(key)
        rows.append(api.submit(key, 10.0))
    api.mark(rows[0], 1.0)
    api.clock.now += 90
    api.mark(rows[1], 1.0)
    seen = []

    def watch(_: float) -> None:
        api.pass_blocks(1)
        (current,) = context.journal.live_submissions()
        if current.state is State.REVEALED:
            seen.append(current.reason)
            api.mark(current.submission_id or 0, 1.0)

    waits.then = watch
    done = run_cycle(context)
    wait = "about 3 min at the pace of the last verdicts"
    assert seen == [f"Place 2 of 2 in the validators' queue by age, {wait}."]
    assert (done.state, done.reason) == (State.VALIDATED, None)


@pytest.mark.parametrize(("rule", "weight"), [("verified", None), ("claim", 0.6)])
def test_the_weight_goes_to_the_submission_that_the_rounds_rule_prefers(tmp_path, rule, weight):
    """The second one is 2% faster. Under `verified` that is equal, and the first one earns."""
    with live_api.serve(tmp_path, ranking=rule) as api:
        api.register(ALICE)
        fork, bench = FakeFork(tmp_path / "fork"), FakeBench()
        waits = marking(api, 1.0)
        context = miner(tmp_path / "state", api, waits, fork=fork, measure=bench)
        first = run_cycle(context)
        fork.content, bench.factor = "changed", 1.02
        second = run_cycle(context)
    assert (first.state, first.weight) == (State.VALIDATED, 0.6)
    assert float(second.tokens_per_sec or 0) > 1.01 * float(first.tokens_per_sec or 0)
    assert (second.state, second.weight) == (State.VALIDATED, weight)
