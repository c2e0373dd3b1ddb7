"""Whole cycles whose measurement stops, crashes, runs out of memory or is rejected."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from harness.measuring.runner import MeasurementError
from harness.report import load_report, write_report
from neurons.miner import daemon
from neurons.miner.context import Context
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle, run_forever
from neurons.runtime.process import Stopped
from tests.harness import samples
from tests.neurons.fake_validator_api import COMMIT
from tests.neurons.miner.parts import ENVIRONMENT, HOTKEY, SETTLED, FakeBench, Miner

NO_MEMORY = MeasurementError("no memory", "out_of_memory")


def test_samples_survive_a_stop(miner, bench):
    bench.faults[2048] = [MeasurementError("stopped on request", "stopped")] * 2
    context = miner()
    with capture_logs() as first:
        assert run_cycle(context).state is State.PUBLISHED
    assert sorted(bench.calls) == [512, 1024, 2048, 2048]
    with capture_logs() as second:
        assert run_cycle(context).state is State.VALIDATED
    kept = [
        [row["runs"] for row in log if row["event"] == "measurements kept"]
        for log in (first, second)
    ]
    assert kept == [[], [2]]
    assert sorted(bench.calls) == [512, 1024, 2048, 2048, *SETTLED]
    assert bench.checks == [2048]  # the correctness check is kept with the samples


def test_row_19_a_truncated_report_is_measured_again(context, bench, monkeypatch):
    _, original = daemon.STEPS[State.MEASURED]
    torn: list[Path] = []

    def claim(submission: Any, context: Any) -> Any:
        if not torn:
            path = context.settings.state_dir / submission.report
            path.write_bytes(path.read_bytes()[:-40])
            torn.append(path)
        return original(submission, context)

    monkeypatch.setitem(daemon.STEPS, State.MEASURED, ("claim", claim))
    assert run_cycle(context).state is State.VALIDATED
    assert sorted(bench.calls) == sorted([512, 1024, *SETTLED] * 2)


@pytest.fixture
def on_a_card(miner: Miner, bench: FakeBench, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A miner with an automatic target on a GPU whose memory does not suffice for 1M tokens."""
    monkeypatch.setattr("neurons.miner.measuring.call", lambda *_, **__: {})  # no GPU to heat
    bench.environment = samples.environment(device="cuda", gpu="a card", cpu_count=2)
    bench.faults[1_000_000] = [NO_MEMORY] * 2
    return miner(target_sequence_length="auto", probe=lambda *_: bench.environment)


def test_row_22_the_longest_target_that_fits_is_claimed(on_a_card, bench):
    bench.faults[900_000] = [None, NO_MEMORY]  # its second run fails
    done = run_cycle(on_a_card)
    assert (done.state, done.target_sequence_length) == (State.VALIDATED, 800_000)
    assert set(done.benchmarks or {}) == {"512", "1024", "2048", "800000"}


def test_row_22_a_length_that_every_validator_times_must_work(miner, bench):
    bench.faults[2048] = [NO_MEMORY]
    held = run_cycle(miner(target_sequence_length=1024))
    assert held.state is State.HELD
    assert "2048 tokens, which validators time too, failed: no memory" in str(held.reason)


def test_unchanged_kernels_need_one_confirming_sample(miner, bench):
    first = run_cycle(miner())
    assert sorted(bench.calls) == sorted([512, 1024, *SETTLED])
    bench.calls.clear()
    second = run_cycle(miner())
    assert (bench.calls, bench.checks) == ([2048], [2048])  # only the confirming sample
    assert second.id != first.id
    assert second.tokens_per_sec == pytest.approx(float(first.tokens_per_sec or 0), rel=0.01)


@pytest.mark.parametrize("change", ["speed", "machine", "code"])
def test_outdated_samples_are_measured_again(miner, bench, kernels, change):
    context = miner()
    run_cycle(context)
    bench.calls.clear()
    if change == "speed":
        bench.factor = 0.9
    elif change == "machine":
        bench.environment = ENVIRONMENT.model_copy(update={"driver": "999"})
        context.probe = lambda *_: bench.environment
    else:
        kernels.content = "kernel 2\n"
    done = run_cycle(context)
    tried = [2048] if change == "speed" else []
    assert sorted(bench.calls) == sorted([512, 1024, *SETTLED, *tried])
    slower = 0.9 if change == "speed" else 1.0
    assert done.tokens_per_sec == pytest.approx(slower * 0.989 * 3010, rel=5e-3)


def test_changed_kernels_release_a_held_submission(context, bench, kernels, waits):
    bench.faults[512] = [MeasurementError("bad kernels", "gate")] * 2
    polled: list[State] = []

    def then(seconds: float) -> None:
        live = context.journal.live(HOTKEY, 2048)
        polled.append(live.state if live else State.VALIDATED)
        if len(polled) == 3:
            bench.faults.clear()
            kernels.content = "kernel 2\n"
        if not live:
            raise Stopped("enough")

    waits.then = then
    run_forever(context)
    assert polled[:3] == [State.HELD] * 3
    done = context.journal.latest()[0]
    assert (done.id, done.state) == (1, State.VALIDATED)
    assert done.content_digest == kernels.digest()


def test_row_25_a_report_without_the_target_gives_no_claim(context, fake_api, monkeypatch):
    _, original = daemon.STEPS[State.MEASURED]

    def claim(submission: Any, context: Any) -> Any:
        path = context.settings.state_dir / submission.report
        report = load_report(path)
        kept = tuple(one for one in report.measurements if one.length < 2048)
        write_report(path, report.model_copy(update={"measurements": kept}))
        return original(submission, context)

    monkeypatch.setitem(daemon.STEPS, State.MEASURED, ("claim", claim))
    held = run_cycle(context)
    assert (held.state, held.resume_state) == (State.HELD, State.MEASURED)
    assert str(held.reason).startswith("Nothing can be claimed: ")
    assert "Set TARGET_SEQUENCE_LENGTH" in str(held.remedy)
    assert str(held.report) in str(held.remedy)
    assert fake_api.count(COMMIT) == 0


LATE = MeasurementError("not done within 1 s", "timeout")
CRASH = MeasurementError("died", "crash")
NO_MODULE = MeasurementError("attn.py needs x, which is not installed", "import", remedy="Run pip.")


@pytest.mark.parametrize(
    ("target", "faults", "calls", "reason", "remedy"),
    [  # two processes are started at once
        (512, {512: [CRASH] * 6}, 6, "died", ""),
        (512, {512: [NO_MODULE]}, 2, "attn.py needs x, which is not installed.", "Run pip."),
        (2048, {2048: [NO_MEMORY]}, 2, "2048 tokens failed: no memory", "TARGET_SEQUENCE_LENGTH"),
        (2048, {2048: [LATE]}, 2, "not done within 1 s", "a larger BENCH_TIMEOUT_SECONDS"),
        (100_000, {}, 0, "TARGET_SEQUENCE_LENGTH=100000", ""),  # too long for a CPU
    ],
)
def test_row_23_failed_measurements_are_held_and_never_claimed(
    miner, bench, fake_api, target, faults, calls, reason, remedy
):
    bench.faults.update({length: [*errors] for length, errors in faults.items()})
    held = run_cycle(miner(target_sequence_length=target))
    assert (held.state, bench.calls.count(target)) == (State.HELD, calls)
    assert reason in str(held.reason)
    assert remedy in str(held.remedy)
    assert fake_api.count(COMMIT) == 0


@pytest.mark.parametrize("target", [2048, "auto"])
@pytest.mark.parametrize("fault", [NO_MEMORY, LATE])
def test_a_released_submission_measures_the_failed_length_again(miner, bench, target, fault):
    bench.faults[512] = [fault]
    assert run_cycle(miner(target_sequence_length=target)).state is State.HELD
    done = run_cycle(miner(target_sequence_length=target, bench_timeout_seconds=900.0))
    assert (done.id, done.state, done.target_sequence_length) == (1, State.VALIDATED, 2048)
    assert set(done.benchmarks or {}) == {"512", "1024", "2048"}


def test_a_stop_keeps_the_targets_that_failed(on_a_card, bench):
    bench.faults[900_000] = [MeasurementError("stopped on request", "stopped")] * 2
    assert run_cycle(on_a_card).state is State.PUBLISHED
    tried = bench.calls.count(1_000_000)
    done = run_cycle(on_a_card)
    assert (done.state, done.target_sequence_length) == (State.VALIDATED, 900_000)
    assert bench.calls.count(1_000_000) == tried
