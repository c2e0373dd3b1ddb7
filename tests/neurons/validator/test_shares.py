"""Simultaneous evaluations: their shares of the machine, and their exclusive measurements."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from harness.measuring.runner import MeasurementError, Options
from harness.sample import Correctness, Sample
from neurons.runtime.process import Stopped
from neurons.validator import evaluate as module
from neurons.validator.clone import Sources
from neurons.validator.devices import Gpu
from neurons.validator.evaluate import Evaluator
from neurons.validator.packages import Packages
from neurons.validator.sandbox import Sandbox
from neurons.validator.shares import evaluators_for
from tests.neurons.validator.samples import CORRECTNESS, Measured
from tests.processes import HANG, wait_for

GIB = 2**30


class Place:
    """A named confinement for fake measurements."""

    def __init__(self, name: str) -> None:
        self.name = name


class Host:
    """Two evaluators on one machine, whose fake measurements count each other.

    Attributes:
        calls: kind of work, length, confinement, and number of simultaneous measurements.
    """

    def __init__(self, folder: Path) -> None:
        self.answers: dict[int, list[Exception]] = {}
        self.calls: list[tuple[str, int, str, int]] = []
        self.meeting = threading.Barrier(1)
        self._busy, self._changing = 0, threading.Lock()
        one = Evaluator(
            *(folder, "cpu", 5.0),
            sources=Sources(files=True),
            confinement=Place("whole"),  # type: ignore[arg-type]
            share=Place("share"),  # type: ignore[arg-type]
            measure=self.measure,
            check=self.check,
        )
        self.evaluators = [replace(one, gpu=gpu) for gpu in ("0", "1")]

    def check(self, tree: Path, length: int, options: Options) -> Correctness:
        self._note("check", length, options, self.meeting.wait)
        return CORRECTNESS

    def measure(self, tree: Path, length: int, options: Options, **_: object) -> Sample:
        self._note("time", length, options)
        if self.answers.get(length):
            raise self.answers[length].pop(0)
        return Measured(1000.0)(tree, length, options)

    def _note(self, work: str, length: int, options: Options, meet: Any = lambda _: None) -> None:
        with self._changing:
            self._busy += 1
        meet(HANG)
        with self._changing:
            place: Any = options.confinement
            self.calls.append((work, length, place.name, self._busy))
        meet(HANG)
        with self._changing:
            self._busy -= 1

    def alone(self) -> list[tuple[str, int]]:
        """Return the calls in the exclusive confinement, after a check that they ran alone."""
        assert all(busy == 1 for _, _, place, busy in self.calls if place == "whole")
        return [(work, length) for work, length, place, _ in self.calls if place == "whole"]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(Evaluator, "_broken_rules", lambda *_: [])
    return Host(tmp_path / "clones")


def test_forks_are_checked_together_and_the_target_is_timed_alone(host, submission):
    """Another fork could slow it down, or compute a part of its calls on another GPU."""
    host.meeting = threading.Barrier(2)
    with ThreadPoolExecutor() as pool:
        for verdict in pool.map(lambda one: one.evaluate(submission), host.evaluators):
            assert verdict.passed
    assert [call for call in host.calls if call[0] == "check"] == [("check", 4096, "share", 2)] * 2
    assert host.alone() == [("time", 4096)] * 2
    shared = sorted(
        length for work, length, place, _ in host.calls if (work, place) == ("time", "share")
    )
    assert shared == [512, 512, 1024, 1024, 2048, 2048]


@pytest.mark.parametrize("kind", sorted(module.AMBIGUOUS))
def test_a_failure_next_to_other_forks_is_repeated_alone(host, submission, kind, monkeypatch):
    monkeypatch.setattr(module, "call", lambda *_, **__: {})  # a sound control run
    host.answers = {1024: [MeasurementError("no memory is left", kind)]}
    assert host.evaluators[0].evaluate(submission).passed
    assert host.alone() == [("time", 4096), ("time", 1024)]
    host.answers = {1024: [MeasurementError("no memory is left", kind)] * 2}
    assert (
        host.evaluators[0].evaluate(submission).reason
        == f"No measurement ({kind}): no memory is left"
    )


def test_a_failed_check_of_the_rules_is_repeated_alone(host, submission, monkeypatch):
    failures = [MeasurementError("it left this machine without memory", "limit")]

    def check_rules(_: Evaluator, tree: Path, options: Options) -> list[str]:
        host._note("rules", 0, options)
        if failures:
            raise failures.pop()
        return []

    monkeypatch.setattr(module, "call", lambda *_, **__: {})  # a sound control run
    monkeypatch.setattr(Evaluator, "_broken_rules", check_rules)
    assert host.evaluators[0].evaluate(submission).passed
    assert host.alone() == [("rules", 0), ("time", 4096)]


def test_waiting_for_others_does_not_count_against_the_budget(host, submission, monkeypatch):
    now, first = [0.0], host.evaluators[0]
    monkeypatch.setattr("neurons.validator.evaluate.time.monotonic", lambda: now[0])
    real = first.lock.alone

    def slow() -> Any:
        now[0] += 1e6
        return real()

    monkeypatch.setattr(first.lock, "alone", slow)
    assert first.evaluate(submission).passed


def test_after_a_stop_no_waiting_measurement_starts(host, submission):
    first, stop = host.evaluators[0], host.evaluators[0].stop
    with ThreadPoolExecutor() as pool:
        with first.lock.shared():
            judged = pool.submit(first.evaluate, submission)
            wait_for(lambda: first.lock._waiting)
            stop.set()
        with pytest.raises(Stopped):
            judged.result(HANG)
    assert host.alone() == []


# ---- GPUs, cores and memory -------------------------------------------------------------------


def gpus(*models: str) -> list[Gpu]:
    return [
        Gpu(str(n), f"GPU-{n}", (Path(f"/dev/nvidia{n}"),), model) for n, model in enumerate(models)
    ]


def evaluator(cores: int, gib: int) -> Evaluator:
    sandbox = Sandbox(
        "", gib * GIB, None, cores=frozenset(range(4, 4 + cores)), packages=Packages()
    )
    return Evaluator(Path(), "cuda", 5.0, confinement=sandbox)


def test_each_evaluation_has_its_own_gpu_cores_and_memory() -> None:
    one = evaluator(9, 64)
    evaluators: list[Any] = evaluators_for(one, gpus("H200", "H200"))
    assert [place.gpu for place in evaluators] == ["0", "1"]
    assert [place.share.gpu.visible for place in evaluators] == ["GPU-0", "GPU-1"]
    assert [sorted(place.share.cores) for place in evaluators] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert [place.share.memory_bytes for place in evaluators] == [32 * GIB] * 2
    for place, gpu in zip(evaluators, gpus("H200", "H200"), strict=True):
        # exclusive measurements: as with one GPU
        assert place.confinement == replace(one.confinement, gpu=gpu)  # type: ignore[type-var]
        assert place.lock is one.lock


@pytest.mark.parametrize(
    ("models", "cores", "gib", "used", "warned"),
    [
        (("H200",), 64, 512, 1, False),
        (("H200", "H200", "H100", "H200"), 64, 512, 3, True),
        (("H200", "H100"), 64, 512, 1, True),
        (("H200",) * 8, 9, 512, 4, True),
        (("H200",) * 8, 64, 31, 3, True),
        (("H200",) * 2, 0, 512, 1, True),
        (("H200",) * 2, 64, 8, 1, True),
    ],
)
def test_unlike_gpus_or_those_without_cores_or_memory_stay_idle(models, cores, gib, used, warned):
    one = evaluator(cores, gib)
    with structlog.testing.capture_logs() as lines:
        evaluators = evaluators_for(one, gpus(*models))
    assert len(evaluators) == used
    assert any(line["log_level"] == "warning" for line in lines) == warned
    if used == 1:
        assert evaluators == [one]  # as with one GPU


def test_without_a_sandbox_there_is_one_evaluator() -> None:
    one = replace(evaluator(9, 64), confinement=None)
    assert evaluators_for(one, gpus("H200", "H200")) == [one]
