"""Whole cycles whose measurement stops, crashes, runs out of memory or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.runner import MeasurementError
from neurons.mining import daemon
from neurons.mining.cycle import State, Step
from neurons.mining.daemon import run_cycle, run_forever
from neurons.processes.runtime import Stopped
from tests.neurons.mining.parts import HOTKEY, StandInBench, StandInFork, Waits, make_context
from tests.neurons.stand_in import StandIn

COMMIT, REVEAL = "/commit_submission", "/reveal_submission"


def test_measurements_survive_a_stop_and_are_not_taken_twice(tmp_path: Path, url: str) -> None:
    bench = StandInBench(faults={2048: [MeasurementError("stopped on request", "stopped")]})
    context = make_context(tmp_path / "state", url, measure=bench, flags={"claim_runs": 2})
    assert run_cycle(context).state is State.PUBLISHED
    assert bench.calls == [512, 512, 1024, 1024, 2048]
    assert run_cycle(context).state is State.VALIDATED
    assert bench.calls == [512, 512, 1024, 1024, 2048, 2048, 2048]


def test_a_torn_report_is_measured_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = StandInBench()
    context = make_context(tmp_path / "state", url, measure=bench)
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


def test_out_of_memory_leaves_the_shorter_lengths(tmp_path: Path, url: str) -> None:
    bench = StandInBench(faults={2048: [MeasurementError("no memory", "out_of_memory")]})
    flags = {"target_sequence_length": 1024}
    context = make_context(tmp_path / "state", url, measure=bench, flags=flags)
    done = run_cycle(context)
    assert done.state is State.VALIDATED
    assert set(done.benchmarks or {}) == {"512", "1024"}


def test_a_length_that_fails_at_its_second_run_is_not_claimed(tmp_path: Path, url: str) -> None:
    class Second(StandInBench):
        def __call__(self, tree: Path, length: int, **names: Any) -> Any:
            if (length, self.calls[-1:]) == (2048, [2048]):
                raise MeasurementError("no memory", "out_of_memory")
            return super().__call__(tree, length, **names)

    flags = {"target_sequence_length": "auto", "claim_runs": 2}
    done = run_cycle(make_context(tmp_path / "state", url, measure=Second(), flags=flags))
    assert (done.state, done.target_sequence_length) == (State.VALIDATED, 1024)
    assert set(done.benchmarks or {}) == {"512", "1024"}


def test_a_target_out_of_memory_is_never_claimed(
    tmp_path: Path, url: str, stand_in: StandIn
) -> None:
    bench = StandInBench(faults={2048: [MeasurementError("no memory", "out_of_memory")]})
    context = make_context(tmp_path / "state", url, measure=bench)
    held = run_cycle(context)
    assert held.state is State.HELD
    assert "TARGET_SEQUENCE_LENGTH" in str(held.remedy)
    assert stand_in.count(COMMIT) == 0


@pytest.mark.parametrize(("length", "kind"), [(512, "gate"), (2048, "out_of_memory")])
def test_what_the_kernels_are_held_for_ends_when_they_change(
    tmp_path: Path, url: str, length: int, kind: Any
) -> None:
    bench = StandInBench(faults={length: [MeasurementError("bad kernels", kind)] * 2})
    fork = StandInFork(tmp_path / "fork")
    waits = Waits()
    context = make_context(tmp_path / "state", url, measure=bench, fork=fork, waiter=waits)
    looks: list[State] = []

    def then(seconds: float) -> None:
        live = context.journal.live(HOTKEY, 2048)
        looks.append(live.state if live else State.VALIDATED)
        if len(looks) == 3:
            bench.faults.clear()
            fork.content = "kernel 2\n"
        if not live:
            raise Stopped("enough")

    waits.then = then
    run_forever(context)
    assert looks[:3] == [State.HELD] * 3
    done = context.journal.latest()[0]
    assert (done.id, done.state) == (1, State.VALIDATED)
    assert done.content_digest == fork.digest()


def test_a_crashing_worker_is_held_after_three(tmp_path: Path, url: str) -> None:
    crashes: list[Exception] = [MeasurementError("died", "crash") for _ in range(3)]
    bench = StandInBench(faults={512: crashes})
    context = make_context(tmp_path / "state", url, measure=bench)
    held = run_cycle(context)
    assert held.state is State.HELD
    assert bench.calls == [512] * 3


def test_a_missing_module_is_held_at_once_by_its_name(tmp_path: Path, url: str) -> None:
    reason = "fla/layers/attn.py needs transformers, which is not installed"
    missing = MeasurementError(reason, "import", remedy="Run pip x.")
    bench = StandInBench(faults={512: [missing]})
    held = run_cycle(make_context(tmp_path / "state", url, measure=bench))
    assert (held.state, bench.calls) == (State.HELD, [512])
    assert str(held.reason).endswith("attn.py needs transformers, which is not installed.")
    assert held.remedy == "Run pip x."


def test_a_long_target_on_a_cpu_is_refused_before_any_measurement(tmp_path: Path, url: str) -> None:
    bench = StandInBench()
    flags = {"target_sequence_length": 100_000}
    context = make_context(tmp_path / "state", url, measure=bench, flags=flags)
    held = run_cycle(context)
    assert (held.state, bench.calls) == (State.HELD, [])
    assert "TARGET_SEQUENCE_LENGTH=100000" in str(held.reason)


def test_auto_claims_the_best_measured_length(tmp_path: Path, url: str) -> None:
    flags = {"target_sequence_length": "auto"}
    context = make_context(tmp_path / "state", url, flags=flags)
    done = run_cycle(context)
    assert (done.state, done.target_sequence_length) == (State.VALIDATED, 2048)
