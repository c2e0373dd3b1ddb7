"""Rounds of samples: with fake processes, and with real ones under a GPU lock."""

from __future__ import annotations

import fcntl
import threading
import time
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from harness.claim import MAX_RUNS, derive_claim
from harness.measuring.plan import FIRST_RUNS, EachLength, ForClaim
from harness.measuring.runner import MeasurementError, Options, measure
from harness.measuring.sampler import Policy, Recorder, Sampler, processes_at_once
from harness.sample import Correctness, Kind, Sample
from tests.harness.samples import environment, make_correctness, make_sample, telemetry

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
def test_cores_and_memory_limit_the_simultaneous_imports(cores, usable, memory_mb, processes):
    machine = environment(cpu_count=cores, usable_cpus=usable, memory_mb=memory_mb)
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


def test_the_gpu_is_warm_before_the_first_process_is_timed(tmp_path: Path) -> None:
    runner, seen = FakeRunner([1000.0, 1100.0] * MAX_RUNS), list[int]()

    def soak() -> None:
        seen.append(len(runner.calls))
        raise MeasurementError("no memory", "out_of_memory")  # does not end the measurement

    sampler = sampler_of(tmp_path, runner, soak=soak)
    sampler.run(claim_plan(sampler))
    assert sampler.rounds > 1
    assert seen == [0]


def test_wrong_results_leave_no_sample(tmp_path: Path) -> None:
    sampler = sampler_of(tmp_path, FakeRunner(correctness=make_correctness(passed=False)))
    with pytest.raises(MeasurementError, match="wrong results: relative RMS error") as caught:
        sampler.run(claim_plan(sampler))
    assert (caught.value.kind, caught.value.length) == ("gate", TARGET)
    assert sampler.samples == []


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


def test_samples_of_a_machine_that_changed_are_not_mixed(tmp_path: Path) -> None:
    class Changing(FakeRunner):
        def measure(self, *arguments: Any, **more: Any) -> Sample:
            sample = super().measure(*arguments, **more)
            usable = 8 if len(self.calls) == 1 else 4  # as when a container gets another cpuset
            return sample.model_copy(update={"environment": environment(usable_cpus=usable)})

    sampler = sampler_of(tmp_path, Changing([1000.0] * 9), at_once=1)
    with pytest.raises(MeasurementError, match="usable_cpus was 8 and is 4") as caught:
        sampler.run(claim_plan(sampler))
    assert caught.value.kind == "crash"
    assert len(sampler.samples) == 1


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


def test_row_22_a_length_without_enough_memory_and_longer_ones_fail(tmp_path: Path) -> None:
    sampler = sampler_of(tmp_path, runner := FakeRunner(), at_once=1)
    sampler.samples = [make_sample(1024, correctness=runner.correctness)]
    runner.faults[1024] = [MeasurementError("no memory", "out_of_memory")]
    plan = EachLength((512, 1024, 2048), runs=2, too_long=LEFT_OUT)
    for _ in range(2):
        sampler.run(plan)
    assert runner.calls == [512, 512, 1024]
    assert [sample.length for sample in sampler.samples] == [512, 512]
    failures = [(failure.length, failure.kind) for failure in sampler.failures]
    assert failures == [(1024, "out_of_memory"), (2048, "out_of_memory")]


def test_a_recorder_receives_the_events(tmp_path: Path) -> None:
    runner, recorder = FakeRunner(), create_autospec(Recorder, instance=True)
    runner.taints = [DISTURBED]
    sampler = sampler_of(tmp_path, runner, at_once=1, soak=lambda: "well", recorder=recorder)
    sampler.run(EachLength((512,), runs=2))
    events = [(name, given[1:2]) for name, given, _ in recorder.mock_calls]
    # three rounds of one sample
    assert [event for event in events if event[0] not in ("planned", "checked", "round_done")] == [
        *(("heated", ()), ("rejected", (1,)), ("accepted", (1,)), ("accepted", (2,)))
    ]


def test_real_processes_start_together_and_are_timed_alone_after_the_check(make_tree, tmp_path):
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
