"""Rounds of samples: with fake processes, and with real ones under a GPU lock."""

from __future__ import annotations

import fcntl
import threading
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from harness.claim import RUNS_MOST, derive_claim
from harness.measuring.plan import FIRST_RUNS, EachLength, ForClaim
from harness.measuring.runner import MeasurementError, Options, measure
from harness.measuring.sampler import Policy, Recorder, Sampler, processes_at_once
from harness.sample import Correctness, Kind, Sample
from tests.harness.samples import environment, make_correctness, make_sample, telemetry
from tests.processes import HANG

OTHERS = (512, 1024)
TARGET = 2048
LEFT_OUT: frozenset[Kind] = frozenset({"out_of_memory", "timeout"})


class FakeRunner:
    """Records which processes are timed; each gives a sample or raises a fault of its length.

    A fake process waits for the GPU lock like a real one.
    """

    def __init__(
        self, speeds: list[float] | None = None, correctness: Correctness | None = None
    ) -> None:
        self.speeds = list(speeds or [])
        self.correctness = correctness or make_correctness(longest=TARGET)
        self.calls: list[int] = []
        self.cold: list[int] = []
        self.checks: list[int] = []
        self.faults: dict[int, list[MeasurementError]] = {}
        self.taints: list[dict[str, Any]] = []

    def check(self, tree: Path, length: int, options: Options) -> Correctness:
        self.checks.append(length)
        return self.correctness

    def measure(
        self, tree: Path, length: int, options: Options, *, gpu_lock: Path, **more: Any
    ) -> Sample:
        with gpu_lock.open() as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if options.stop is not None and options.stop.is_set():
                        raise MeasurementError("stopped on request", "stopped") from None
                    time.sleep(0.001)
            self.calls.append(length)
            if more["cold_cache"]:
                self.cold.append(length)
            if self.faults.get(length):
                raise self.faults[length].pop(0)
            speed = self.speeds.pop(0) if length == TARGET and self.speeds else 1000.0
            taint = self.taints.pop(0) if self.taints else {}
            return make_sample(length, speed, correctness=None, **taint)


class Events(Recorder):
    """Records the events by name."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.failures: list[tuple[int, str]] = []
        self.count = 0

    def accepted(self, sample: Sample, number: int) -> None:
        self.names.append(f"accepted {number}")

    def rejected(self, sample: Sample, number: int, reason: str) -> None:
        self.names.append(f"rejected {number}")

    def checked(self, correctness: Correctness) -> None:
        self.names.append("checked")

    def heated(self, result: object) -> None:
        self.names.append(f"heated {result}")

    def failed(self, length: int, error: MeasurementError) -> None:
        self.failures.append((length, error.kind))

    def round_done(self, samples: Any, failures: Any) -> None:
        self.count = len(samples)


def sampler_of(tree: Path, runner: FakeRunner, at_once: int = 8, **parts: Any) -> Sampler:
    policy = Policy(attempts=3, left_out=LEFT_OUT, cold={TARGET})
    options = {"policy": policy, "wait": lambda _: None, "measure": runner.measure, **parts}
    return Sampler(tree=tree, options=Options(), check=runner.check, at_once=at_once, **options)


def claim_plan(sampler: Sampler, **changes: Any) -> ForClaim:
    return ForClaim(TARGET, **{"others": OTHERS, "at_once": sampler.at_once, **changes})


@pytest.mark.parametrize(
    ("cores", "usable", "memory_mb", "processes"),
    [
        (64, 64, 500_000.0, 14),
        (3, None, None, 3),
        (16, 2, None, 2),
        (16, 16, 3 * 4096.0 - 1, 2),
        (16, 16, 100.0, 1),
    ],
)
def test_cores_and_memory_limit_how_many_processes_import_at_once(
    cores: int, usable: int | None, memory_mb: float | None, processes: int
) -> None:
    machine = environment().model_copy(
        update={"cpu_count": cores, "usable_cpus": usable, "memory_mb": memory_mb}
    )
    assert processes_at_once(machine) == processes


def test_a_quiet_machine_needs_one_round_and_one_check(tmp_path: Path) -> None:
    runner = FakeRunner()
    sampler = sampler_of(tmp_path, runner, at_once=len(OTHERS) + FIRST_RUNS)
    sampler.run(claim_plan(sampler))
    assert sorted(runner.calls) == sorted([*OTHERS, *[TARGET] * FIRST_RUNS])
    assert (sampler.rounds, runner.checks, runner.cold) == (1, [TARGET], [TARGET])
    runs = {length: sampler.of(length) for length in (*OTHERS, TARGET)}
    assert derive_claim(runs, TARGET).runs == FIRST_RUNS


@pytest.mark.parametrize(
    "earlier",
    [None, make_correctness(longest=TARGET, passed=False), make_correctness(longest=TARGET - 1)],
)
def test_a_check_that_does_not_cover_the_length_is_repeated(tmp_path, earlier):
    sampler = sampler_of(tmp_path, runner := FakeRunner())
    sampler.samples = [make_sample(OTHERS[0], correctness=earlier)]
    sampler.run(claim_plan(sampler))
    assert runner.checks == [TARGET]


def test_no_sample_is_repeated(tmp_path: Path) -> None:
    sampler = sampler_of(tmp_path, runner := FakeRunner())
    sampler.run(claim_plan(sampler))
    runner.calls.clear()
    sampler.run(claim_plan(sampler))
    assert runner.calls == []
    sampler.run(claim_plan(sampler, confirming=len(sampler.of(TARGET))))
    assert (runner.calls, runner.checks) == ([TARGET], [TARGET])


def test_the_gpu_is_warm_before_the_first_process_is_timed(tmp_path: Path) -> None:
    runner, seen = FakeRunner([1000.0, 1100.0] * RUNS_MOST), list[int]()
    sampler = sampler_of(tmp_path, runner, soak=lambda: seen.append(len(runner.calls)))
    sampler.run(claim_plan(sampler))
    assert sampler.rounds > 1
    assert seen == [0]


def test_a_failed_heat_soak_does_not_end_the_measurement(tmp_path: Path) -> None:
    def fails() -> None:
        raise MeasurementError("no memory", "out_of_memory")

    sampler = sampler_of(tmp_path, FakeRunner(), soak=fails)
    sampler.run(claim_plan(sampler))
    assert sampler.of(TARGET)


def test_the_gpu_is_heated_while_all_processes_import_and_the_check_runs(tmp_path):
    together, runner = threading.Barrier(3 + 2), FakeRunner()

    def measure(*arguments: Any, **more: Any) -> Sample:
        if not heated.is_set():
            together.wait(HANG)
        return runner.measure(*arguments, **more)

    def check(*arguments: Any, **_: Any) -> Correctness:
        together.wait(HANG)
        return runner.check(*arguments)

    def soak() -> None:
        together.wait(HANG)
        heated.set()

    heated = threading.Event()
    sampler = sampler_of(tmp_path, runner, at_once=3, soak=soak)
    sampler.check, sampler.measure = check, measure
    sampler.run(claim_plan(sampler))
    assert heated.is_set()


def test_wrong_results_leave_no_sample(tmp_path: Path) -> None:
    sampler = sampler_of(tmp_path, FakeRunner(correctness=make_correctness(passed=False)))
    with pytest.raises(MeasurementError, match="wrong results: relative RMS error") as caught:
        sampler.run(claim_plan(sampler))
    assert (caught.value.kind, caught.value.length) == ("gate", TARGET)
    assert sampler.samples == []


@pytest.mark.parametrize("length", [512, TARGET])
def test_a_length_that_runs_out_of_memory_fails_the_target(tmp_path: Path, length: int) -> None:
    runner = FakeRunner()
    runner.faults[length] = [MeasurementError("no memory", "out_of_memory")] * 8
    sampler = sampler_of(tmp_path, runner)
    sampler.run(claim_plan(sampler))
    assert sorted(failure.length for failure in sampler.failures) == sorted({length, TARGET})
    assert sampler.of(TARGET) == []
    assert all("no memory" in failure.reason for failure in sampler.failures)


def test_another_error_ends_the_measurement_and_keeps_its_samples(tmp_path):
    runner = FakeRunner()
    sampler = sampler_of(tmp_path, runner, at_once=1)
    runner.faults[TARGET] = [MeasurementError("it died", "crash")]
    with pytest.raises(MeasurementError, match="it died") as caught:
        sampler.run(claim_plan(sampler))
    assert caught.value.length == TARGET
    assert [m.length for m in sampler.samples] == [*OTHERS]
    sampler.run(claim_plan(sampler))  # continues there
    assert runner.calls == [*OTHERS, *[TARGET] * (1 + FIRST_RUNS)]


def test_the_error_is_that_of_the_process_which_stopped_the_check(tmp_path: Path) -> None:
    runner, died = FakeRunner(), threading.Event()

    def check(tree: Path, length: int, options: Any) -> Correctness:
        died.set()
        while not options.stop.is_set():
            time.sleep(0.01)
        raise MeasurementError("stopped on request", "stopped")

    def measure(*_: Any, **__: Any) -> Sample:
        died.wait()
        raise MeasurementError("it died while it was imported", "crash")

    sampler = sampler_of(tmp_path, runner)
    sampler.check, sampler.measure = check, measure
    with pytest.raises(MeasurementError, match="while it was imported"):
        sampler.run(claim_plan(sampler))


DISTURBED = {"telemetry": telemetry({"processes": 1}, {})}


def test_disturbed_samples_are_kept_and_repeated(tmp_path: Path) -> None:
    runner, waits = FakeRunner(), list[float]()
    runner.taints = [DISTURBED, DISTURBED]
    sampler = sampler_of(tmp_path, runner, at_once=3, wait=waits.append)
    sampler.run(claim_plan(sampler))
    assert len(waits) == 1
    runs = {n: [m for m in sampler.samples if m.length == n] for n in (*OTHERS, TARGET)}
    claim = derive_claim(runs, TARGET)
    assert (claim.runs, len(claim.rejected)) == (FIRST_RUNS, 2)
    assert all("other processes (1) computed" in sentence for sentence in claim.rejected)


def test_a_persistent_disturbance_ends_the_measurement(tmp_path: Path) -> None:
    runner = FakeRunner()
    runner.taints = [{"telemetry": telemetry({"processes": n}, {})} for n in range(1, 4)]
    last = r"3 samples at \d+ tokens .*\(3\) computed"
    with pytest.raises(MeasurementError, match=last) as caught:
        sampler_of(tmp_path, runner, at_once=1).run(ForClaim(TARGET))
    assert caught.value.kind == "disturbed"


def test_each_length_is_measured_after_one_check(tmp_path: Path) -> None:
    sampler = sampler_of(tmp_path, runner := FakeRunner(), at_once=1)
    sampler.run(EachLength((2048, 512), runs=2))
    assert (runner.calls, runner.checks, runner.cold) == ([512, 512, 2048, 2048], [2048], [2048])
    assert all(sample.correctness == runner.correctness for sample in sampler.samples)


def test_samples_of_unchecked_code_count_if_the_policy_allows_it(tmp_path: Path) -> None:
    sampler = sampler_of(tmp_path, runner := FakeRunner(), policy=Policy(checked=False))
    sampler.run(EachLength((512,)))
    assert (runner.calls, runner.checks) == ([512], [])
    assert [sample.correctness for sample in sampler.samples] == [None]


def test_row_22_no_longer_length_is_tried_after_one_ran_out_of_memory(tmp_path: Path) -> None:
    sampler, events = sampler_of(tmp_path, runner := FakeRunner(), at_once=1), Events()
    sampler.recorder = events
    runner.faults[1024] = [MeasurementError("no memory", "out_of_memory")]
    plan = EachLength((512, 1024, 2048), too_long=LEFT_OUT)
    for _ in range(2):
        sampler.run(plan)
    assert runner.calls == [512, 1024]
    assert [(f.length, f.kind) for f in sampler.failures] == [
        *((1024, "out_of_memory"), (2048, "out_of_memory"))
    ]
    assert (events.failures, events.count) == ([(1024, "out_of_memory")], 1)


def test_a_recorder_receives_every_event(tmp_path: Path) -> None:
    runner, events = FakeRunner(), Events()
    runner.taints = [DISTURBED]
    sampler = sampler_of(tmp_path, runner, at_once=1, soak=lambda: "well")
    sampler.recorder = events
    sampler.run(EachLength((512,), runs=2))
    assert sorted(events.names[:2]) == ["checked", "heated well"]
    assert events.names[2:] == ["rejected 1", "accepted 1", "accepted 2"]
    assert events.count == 3


def test_real_processes_start_together_and_are_timed_alone_after_the_check(
    make_tree: Any, tmp_path: Path
) -> None:
    log = tmp_path / "calls"
    noted = (
        "import os\n"
        "def _note(event):\n"
        f"    with open({str(log)!r}, 'a') as calls:\n"
        "        calls.write(f'{event} {os.getpid()}\\n')\n"
        "_note('imported')\n"
        "_forward = QuasarAttention.forward\n"
        "def forward(self, x, **options):\n"
        "    if x.shape[1] in (8, 16):\n"
        "        _note('called')\n"
        "    return _forward(self, x, **options)\n"
        "QuasarAttention.forward = forward\n"
    )
    tree = make_tree(noted)

    def passes(tree: Path, length: int, options: Options) -> Correctness:
        from harness.source import source_digest

        while log.read_text().count("imported") < 3 if log.exists() else True:
            time.sleep(0.05)  # wait until all have imported
        with log.open("a") as calls:
            calls.write("passed 0\n")
        return make_correctness(longest=16, digest=source_digest(tree))

    def without_cross_check(*arguments: Any, **more: Any) -> Sample:
        return measure(*arguments, **{**more, "cross_check": False})  # it compares speeds

    sampler = Sampler(
        tree=tree,
        options=Options("cpu"),
        policy=Policy(attempts=3),
        measure=without_cross_check,
        check=passes,
        at_once=3,
    )
    sampler.run(ForClaim(16, (8,), most=2))
    assert sorted(m.length for m in sampler.samples) == [8, 16, 16]
    events = [line.split() for line in log.read_text().splitlines()]
    assert [name for name, _ in groupby(name for name, _ in events)] == [
        *("imported", "passed", "called")
    ]
    called = [pid for pid, _ in groupby(pid for name, pid in events if name == "called")]
    assert len(called) == len(set(called)) == 3, "the calls of two processes interleave"
