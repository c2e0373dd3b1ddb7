"""The decoding benchmark: a trial on a CPU, and its limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import inference
from benchmarks.cases.inference import limits
from benchmarks.engine.commands import run_case
from benchmarks.engine.results import load
from tests.benchmarks.runs import changed


def test_a_trial_measures_every_way_and_a_slow_server_is_named(tmp_path: Path) -> None:
    out = tmp_path / "inference.json"
    arguments = ["--device", "cpu", "--size", "tiny", "--new", "4", "--out", str(out)]
    assert run_case(inference, arguments) == 0
    run = load(out)
    assert [entry.by for entry in run.entries] == ["generate", "server", "generate, static cache"]
    speeds = [entry.figures["tokens_per_sec"] for entry in run.entries]
    assert min(speeds) > 0
    slower = changed(run, "ways", "figures/tokens_per_sec", speeds[2] / 2, by="server")
    (limit,) = limits(slower)
    assert limit.value == pytest.approx(0.5)
    assert not limit.met
