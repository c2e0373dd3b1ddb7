"""A tree's speed: which check stands for a length, which caches are cold, what a failure costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.layer import speed
from benchmarks.layer.trees import TREES
from harness.measuring.runner import MeasurementError
from harness.report import load_report
from harness.sample import Correctness, Failure
from tests.harness.samples import make_correctness, make_sample

CALLS: list[tuple[int, bool, bool]] = []
SHORT, LONG = make_correctness(longest=512), make_correctness(longest=65536)


@pytest.fixture(autouse=True)
def fake_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the calls in place of measurements; 2,048 tokens fail in the second round."""
    CALLS.clear()
    monkeypatch.setattr(speed, "AT_ONCE", 1)

    def measure(
        _: Path, length: int, *__: Any, cross_check: bool, cold_cache: bool, gpu_lock: Path
    ) -> Any:
        CALLS.append((length, cross_check, cold_cache))
        if [call[0] for call in CALLS].count(2048) == 2 and length == 2048:
            raise MeasurementError("no memory", "out_of_memory")
        return make_sample(length, correctness=None)

    monkeypatch.setattr(speed, "measure", measure)


def plan(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    tree = TREES["overlay"]._replace(**changes)
    monkeypatch.setitem(TREES, "overlay", tree)


def test_rounds_after_the_check_of_the_next_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(monkeypatch, lengths=(512, 1024, 2048, 4096), short_runs=2, cold=(512, 4096))
    gates = {512: SHORT, 2048: LONG}
    found = speed.time_tree("overlay", tmp_path, gates, tmp_path / "turn", "cpu")
    first = [(512, True, True), (1024, True, False), (2048, True, False), (4096, True, True)]
    assert [*first, *((length, True, False) for length, *_ in first)] == CALLS
    checks = {m.length: m.correctness for m in found.samples}
    assert checks == {512: SHORT, 1024: LONG, 4096: LONG}
    speed.report(found, tmp_path / "report.json", None)
    report = load_report(tmp_path / "report.json")
    assert [m.length for m in report.measurements] == [512, 512, 1024, 1024, 4096, 4096]
    assert [(f.length, f.kind) for f in report.failures] == [(2048, "out_of_memory")]


def test_nothing_is_timed_after_a_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(monkeypatch, lengths=(512, 1024), short_runs=2)
    gates: dict[int, Correctness | Failure] = {
        512: SHORT,
        1024: Failure(length=1024, kind="crash", reason="it died"),
    }
    found = speed.time_tree("overlay", tmp_path, gates, tmp_path / "turn", "cpu")
    assert [length for length, *_ in CALLS] == [512, 512]
    assert [(f.length, f.kind, f.reason) for f in found.failures] == [(1024, "crash", "it died")]


def test_a_tree_without_checks_is_timed_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(monkeypatch, lengths=(512,), short_runs=1)
    speed.time_tree("overlay", tmp_path, {}, tmp_path / "turn", "cpu")
    assert CALLS == [(512, False, True)]


def test_calls_that_wait_for_the_host_take_more_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(monkeypatch, lengths=(512, 4096, 16_384), runs=2, short_runs=3)
    speed.time_tree("overlay", tmp_path, {}, tmp_path / "turn", "cpu")
    rounds = [(512, 4096, 16_384)] * 2 + [(512, 4096)]
    assert [length for length, *_ in CALLS] == [length for lengths in rounds for length in lengths]
