"""The short cycle: which processes are started, what stands for what, and real ones in turns."""

from __future__ import annotations

import threading
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from harness.claim import RUNS_MOST, derive_claim
from harness.measuring.runner import MeasurementError
from harness.measuring.series import Policy
from harness.measuring.together import FIRST_RUNS, ShortSeries, processes_at_once
from harness.report import GateResult, Kind, Measurement
from tests.harness.samples import environment, gate_result, measurement, telemetry
from tests.processes import HANG

BESIDE = (512, 1024)
TARGET = 2048
LEFT_OUT: frozenset[Kind] = frozenset({"out_of_memory", "timeout"})


class Stand:
    """Stands in for the runner: processes that note when they start, and end when they are told."""

    def __init__(self, speeds: list[float] | None = None, gate: GateResult | None = None) -> None:
        self.speeds, self.gate = list(speeds or []), gate or gate_result(longest=TARGET)
        self.calls: list[int] = []
        self.cold: list[int] = []
        self.checks: list[int] = []
        self.faults: dict[int, list[MeasurementError]] = {}
        self.taints: list[dict[str, Any]] = []
        self.checked = threading.Event()
        self.alone = threading.Lock()

    def check(self, tree: Path, length: int, **_: Any) -> GateResult:
        self.checks.append(length)
        self.checked.set()
        return self.gate

    def measure(self, tree: Path, length: int, *, gate: Any, **options: Any) -> Measurement:
        assert options["turn"].exists()
        checked = gate()
        with self.alone:
            self.calls.append(length)
            if options["cold_cache"]:
                self.cold.append(length)
            if self.faults.get(length):
                raise self.faults[length].pop(0)
            speed = self.speeds.pop(0) if length == TARGET and self.speeds else 1000.0
            taint = self.taints.pop(0) if self.taints else {}
            return measurement(length, speed, gate=checked, **taint)


def short(tree: Path, stand: Stand, at_once: int = 8, **options: Any) -> ShortSeries:
    policy = Policy(runs=1, samples=3, left_out=LEFT_OUT, cold={TARGET})
    given = {"wait": lambda _: None, "at_once": at_once, **options}
    return ShortSeries(tree, policy, measure=stand.measure, check=stand.check, **given)


@pytest.mark.parametrize(
    ("cores", "usable", "memory_mb", "processes"),
    [
        (64, 64, 500_000.0, 14),
        (64, None, None, 14),
        (3, None, None, 3),
        (16, 2, None, 2),
        (1, 1, None, 1),
        (16, 16, 3 * 4096.0 - 1, 2),
        (16, 16, 3 * 4096.0, 3),
        (16, 16, 100.0, 1),
    ],
)
def test_as_many_processes_import_side_by_side_as_cores_and_memory_allow(
    cores: int, usable: int | None, memory_mb: float | None, processes: int
) -> None:
    machine = environment().model_copy(
        update={"cpu_count": cores, "usable_cpus": usable, "memory_mb": memory_mb}
    )
    assert processes_at_once(machine) == processes


def test_a_quiet_machine_needs_one_round_and_one_gate(tmp_path: Path) -> None:
    stand = Stand()
    series = short(tmp_path, stand, at_once=len(BESIDE) + FIRST_RUNS)
    assert series.run_for(TARGET, BESIDE)
    assert sorted(stand.calls) == sorted([*BESIDE, *[TARGET] * FIRST_RUNS])
    assert (series.rounds, stand.checks, stand.cold) == (1, [TARGET], [TARGET])
    runs = {length: series.of(length) for length in (*BESIDE, TARGET)}
    assert derive_claim(runs, TARGET).runs == FIRST_RUNS


def test_free_places_of_the_first_round_take_the_target(tmp_path: Path) -> None:
    series = short(tmp_path, stand := Stand(), at_once=14)
    assert series.run_for(TARGET, BESIDE)
    assert stand.calls.count(TARGET) == 14 - len(BESIDE)
    assert series.rounds == 1
    short(tmp_path, stand := Stand(), at_once=14, most=7).run_for(TARGET, BESIDE)
    assert stand.calls.count(TARGET) == 7


def test_a_noisy_machine_takes_more_runs_until_the_cap(tmp_path: Path) -> None:
    stand = Stand([1000.0, 1100.0] * RUNS_MOST)
    series = short(tmp_path, stand)
    assert series.run_for(TARGET, BESIDE)
    assert len(series.of(TARGET)) == RUNS_MOST
    assert stand.checks == [TARGET]
    assert series.rounds == 3  # of 6 and two times 5 runs


def test_what_was_taken_up_counts(tmp_path: Path) -> None:
    series = short(tmp_path, stand := Stand())
    gate = gate_result(longest=TARGET)
    series.measurements = [measurement(n, gate=gate) for n in (*BESIDE, TARGET, TARGET)]
    assert series.run_for(TARGET, BESIDE)
    assert (stand.calls, stand.checks) == ([TARGET] * (FIRST_RUNS - 2), [])


@pytest.mark.parametrize(
    "gate", [None, gate_result(longest=TARGET, passed=False), gate_result(longest=TARGET - 1)]
)
def test_a_gate_that_says_too_little_is_run_again(tmp_path: Path, gate: GateResult | None) -> None:
    series = short(tmp_path, stand := Stand())
    series.measurements = [measurement(BESIDE[0], gate=gate)]
    assert series.run_for(TARGET, BESIDE)
    assert stand.checks == [TARGET]


def test_a_length_may_be_measured_alone(tmp_path: Path) -> None:
    series = short(tmp_path, stand := Stand(), at_once=FIRST_RUNS)
    assert series.run_for(TARGET, ())
    assert stand.calls == [TARGET] * FIRST_RUNS


def test_few_cores_take_more_rounds(tmp_path: Path) -> None:
    series = short(tmp_path, stand := Stand(), at_once=2)
    assert series.run_for(TARGET, BESIDE)
    assert series.rounds == 4
    assert len(stand.calls) == len(BESIDE) + FIRST_RUNS


def test_nothing_is_taken_twice(tmp_path: Path) -> None:
    series = short(tmp_path, stand := Stand())
    series.run_for(TARGET, BESIDE)
    stand.calls.clear()
    assert series.run_for(TARGET, BESIDE)
    assert stand.calls == []
    assert series.run_for(TARGET, BESIDE, more=1)
    assert (stand.calls, stand.checks) == ([TARGET], [TARGET])


def test_the_gpu_is_warm_before_the_first_process_is_timed(tmp_path: Path) -> None:
    stand, seen = Stand([1000.0, 1100.0] * RUNS_MOST), list[int]()
    series = short(tmp_path, stand, soak=lambda: seen.append(len(stand.calls)))
    assert series.run_for(TARGET, BESIDE)
    assert series.rounds > 1
    assert seen == [0]

    def fails() -> None:
        raise MeasurementError("no memory", "out_of_memory")

    assert short(tmp_path, Stand(), soak=fails).run_for(TARGET, BESIDE)


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_gpu_is_heated_while_all_processes_import_and_the_gate_runs(
    tmp_path: Path, at_once: int
) -> None:
    together, stand = threading.Barrier(at_once + 2), Stand()

    def measure(tree: Path, length: int, **options: Any) -> Measurement:
        if not heated.is_set():
            together.wait(HANG)
        return stand.measure(tree, length, **options)

    def check(tree: Path, length: int, **options: Any) -> GateResult:
        together.wait(HANG)
        return stand.check(tree, length, **options)

    def soak() -> None:
        together.wait(HANG)
        heated.set()

    heated = threading.Event()
    series = short(tmp_path, stand, at_once=at_once, soak=soak)
    series.check, series.measure = check, measure
    assert series.run_for(TARGET, BESIDE)
    assert heated.is_set()


def test_nothing_counts_behind_a_red_gate(tmp_path: Path) -> None:
    one = gate_result(passed=False).checks[0]
    checks = tuple(one.model_copy(update={"name": name}) for name in "abcd")
    series = short(tmp_path, Stand(gate=gate_result(passed=False, checks=checks)))
    with pytest.raises(MeasurementError, match=r"wrong results: a .*; b .*; c [^;]*$") as caught:
        series.run_for(TARGET, BESIDE)
    assert caught.value.kind == "gate"
    assert series.measurements == []


@pytest.mark.parametrize("length", [512, TARGET])
def test_what_runs_out_of_memory_costs_the_target(tmp_path: Path, length: int) -> None:
    stand = Stand()
    stand.faults[length] = [MeasurementError("no memory", "out_of_memory")] * 8
    series = short(tmp_path, stand)
    assert not series.run_for(TARGET, BESIDE)
    assert sorted(failure.length for failure in series.failures) == sorted({length, TARGET})
    assert series.of(TARGET) == []
    assert [n for n in BESIDE if series.of(n)] == [n for n in BESIDE if n != length]
    assert all("no memory" in failure.reason for failure in series.failures)


def test_an_error_that_is_not_left_out_ends_the_series_and_keeps_what_it_has(
    tmp_path: Path,
) -> None:
    stand = Stand()
    series = short(tmp_path, stand, at_once=1)
    stand.faults[TARGET] = [MeasurementError("it died", "crash")]
    with pytest.raises(MeasurementError, match="it died"):
        series.run_for(TARGET, BESIDE)
    assert [m.length for m in series.measurements] == [*BESIDE]


def test_the_run_that_stopped_the_gate_is_blamed(tmp_path: Path) -> None:
    stand, died = Stand(), threading.Event()

    def check(tree: Path, length: int, *, stop: Any, **_: Any) -> GateResult:
        died.set()
        while not stop.is_set():
            time.sleep(0.01)
        raise MeasurementError("stopped on request", "stopped")

    def measure(tree: Path, length: int, **_: Any) -> Measurement:
        died.wait()
        raise MeasurementError("it died while it was imported", "crash")

    series = short(tmp_path, stand)
    series.check, series.measure = check, measure
    with pytest.raises(MeasurementError, match="while it was imported"):
        series.run_for(TARGET, BESIDE)


DISTURBED = {"telemetry": telemetry({"processes": 1}, {})}


def test_disturbed_runs_are_kept_named_and_taken_again(tmp_path: Path) -> None:
    stand, waits = Stand(), list[float]()
    stand.taints = [DISTURBED, DISTURBED]
    series = short(tmp_path, stand, at_once=3, wait=waits.append)
    assert series.run_for(TARGET, BESIDE)
    assert len(waits) == 1
    runs = {n: [m for m in series.measurements if m.length == n] for n in (*BESIDE, TARGET)}
    claim = derive_claim(runs, TARGET)
    assert (claim.runs, len(claim.rejected)) == (FIRST_RUNS, 2)
    assert all("other processes (1) computed" in sentence for sentence in claim.rejected)


def test_a_disturbance_that_persists_ends_the_series(tmp_path: Path) -> None:
    stand = Stand()
    stand.taints = [{"telemetry": telemetry({"processes": n}, {})} for n in range(1, 50)]
    last = r"3 samples at \d+ tokens .*\(3\) computed"
    with pytest.raises(MeasurementError, match=last) as caught:
        short(tmp_path, stand, at_once=1).run_for(TARGET, ())
    assert caught.value.kind == "disturbed"
    stand.taints = [DISTURBED] * 50
    with pytest.raises(MeasurementError, match="5 samples at"):
        short(tmp_path, stand, at_once=5).run_for(TARGET, ())


def test_a_stop_keeps_the_rounds_before_it(tmp_path: Path) -> None:
    stand = Stand()
    stop = threading.Event()
    series = short(tmp_path, stand, at_once=2, stop=stop)
    stand.faults[TARGET] = [MeasurementError("stopped on request", "stopped")] * 2
    with pytest.raises(MeasurementError, match="stopped on request"):
        series.run_for(TARGET, BESIDE)
    assert sorted(m.length for m in series.measurements) == [*BESIDE]


def test_real_processes_start_together_and_are_timed_alone_behind_the_gate(
    make_tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    log = tmp_path / "calls"
    noted = (
        "import os\n"
        "def _note(what):\n"
        f"    with open({str(log)!r}, 'a') as calls:\n"
        "        calls.write(f'{what} {os.getpid()}\\n')\n"
        "_note('imported')\n"
        "_forward = QuasarAttention.forward\n"
        "def forward(self, x, **options):\n"
        "    if x.shape[1] in (8, 16):\n"
        "        _note('called')\n"
        "    return _forward(self, x, **options)\n"
        "QuasarAttention.forward = forward\n"
    )
    tree = make_tree(noted)

    def green(tree: Path, length: int, **_: Any) -> GateResult:
        from harness.source import source_digest

        while log.read_text().count("imported") < 3 if log.exists() else True:
            time.sleep(0.05)  # all import while the gate runs
        with log.open("a") as calls:
            calls.write("green 0\n")
        return gate_result(longest=16, digest=source_digest(tree))

    series = ShortSeries(tree, Policy(runs=1), "cpu", check=green, at_once=3, most=2)
    assert series.run_for(16, [8])
    assert sorted(m.length for m in series.measurements) == [8, 16, 16]
    events = [line.split() for line in log.read_text().splitlines()]
    assert [what for what, _ in groupby(what for what, _ in events)] == [
        *("imported", "green", "called")
    ]
    called = [pid for pid, _ in groupby(pid for what, pid in events if what == "called")]
    assert len(called) == len(set(called)) == 3, "their calls lie between one another's"
