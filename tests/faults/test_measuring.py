"""Whole cycles whose measurement stops, crashes, runs out of memory or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.runner import MeasurementError
from neurons.mining import daemon
from neurons.mining.context import Context
from neurons.mining.cycle import State, Step
from neurons.mining.daemon import run_cycle, run_forever
from neurons.processes.runtime import Stopped
from tests.neurons.mining.parts import HOTKEY, Miner, StandInBench, StandInFork, Waits
from tests.neurons.stand_in import COMMIT, StandIn

NO_MEMORY = MeasurementError("no memory", "out_of_memory")


def test_measurements_survive_a_stop_and_are_not_taken_twice(
    miner: Miner, bench: StandInBench
) -> None:
    bench.faults[2048] = [MeasurementError("stopped on request", "stopped")]
    context = miner(claim_runs=2)
    assert run_cycle(context).state is State.PUBLISHED
    assert bench.calls == [512, 512, 1024, 1024, 2048]
    assert run_cycle(context).state is State.VALIDATED
    assert bench.calls == [512, 512, 1024, 1024, 2048, 2048, 2048]


def test_row_19_a_torn_report_is_measured_again(
    context: Context, bench: StandInBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = daemon.STEPS[Step.CLAIM]
    torn: list[Path] = []

    def claim(submission: Any, context: Any) -> Any:
        if not torn:
            path = context.settings.state_dir / submission.report
            path.write_bytes(path.read_bytes()[:-40])
            torn.append(path)
        return original(submission, context)

    monkeypatch.setitem(daemon.STEPS, Step.CLAIM, claim)
    assert run_cycle(context).state is State.VALIDATED
    assert bench.calls == [512, 1024, 2048] * 2


@pytest.mark.parametrize(
    ("target", "runs", "faults", "claimed"),
    [
        (1024, 1, [NO_MEMORY], 1024),
        ("auto", 2, [None, NO_MEMORY], 1024),  # its second run fails
        ("auto", 1, [], 2048),
    ],
)
def test_row_22_the_longest_length_that_was_measured_is_claimed(
    miner: Miner, bench: StandInBench, target: int | str, runs: int, faults: Any, claimed: int
) -> None:
    bench.faults[2048] = [*faults]
    done = run_cycle(miner(target_sequence_length=target, claim_runs=runs))
    assert (done.state, done.target_sequence_length) == (State.VALIDATED, claimed)
    lengths = {"512", "1024", "2048"} if claimed == 2048 else {"512", "1024"}
    assert set(done.benchmarks or {}) == lengths


@pytest.mark.parametrize(("length", "kind"), [(512, "gate"), (2048, "out_of_memory")])
def test_what_the_kernels_are_held_for_ends_when_they_change(
    context: Context,
    bench: StandInBench,
    kernels: StandInFork,
    waits: Waits,
    length: int,
    kind: Any,
) -> None:
    bench.faults[length] = [MeasurementError("bad kernels", kind)] * 2
    looks: list[State] = []

    def then(seconds: float) -> None:
        live = context.journal.live(HOTKEY, 2048)
        looks.append(live.state if live else State.VALIDATED)
        if len(looks) == 3:
            bench.faults.clear()
            kernels.content = "kernel 2\n"
        if not live:
            raise Stopped("enough")

    waits.then = then
    run_forever(context)
    assert looks[:3] == [State.HELD] * 3
    done = context.journal.latest()[0]
    assert (done.id, done.state) == (1, State.VALIDATED)
    assert done.content_digest == kernels.digest()


CRASH = MeasurementError("died", "crash")
NO_MODULE = MeasurementError("attn.py needs x, which is not installed", "import", remedy="Run pip.")


@pytest.mark.parametrize(
    ("target", "faults", "calls", "reason", "remedy"),
    [
        (512, {512: [CRASH] * 3}, [512] * 3, "died", ""),
        (512, {512: [NO_MODULE]}, [512], "attn.py needs x, which is not installed.", "Run pip."),
        (2048, {2048: [NO_MEMORY]}, [512, 1024, 2048], "", "TARGET_SEQUENCE_LENGTH"),
        (100_000, {}, [], "TARGET_SEQUENCE_LENGTH=100000", ""),  # too long for a CPU
    ],
)
def test_row_23_what_cannot_be_measured_is_held_and_never_claimed(
    miner: Miner,
    bench: StandInBench,
    stand_in: StandIn,
    target: int,
    faults: dict[int, list[Exception]],
    calls: list[int],
    reason: str,
    remedy: str,
) -> None:
    bench.faults.update({length: [*errors] for length, errors in faults.items()})
    held = run_cycle(miner(target_sequence_length=target))
    assert (held.state, bench.calls) == (State.HELD, calls)
    assert reason in str(held.reason)
    assert remedy in str(held.remedy)
    assert stand_in.count(COMMIT) == 0
