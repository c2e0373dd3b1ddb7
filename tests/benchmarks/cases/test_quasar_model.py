"""The public model's case on a CPU, with a model of the same names."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import quasar_model
from benchmarks.engine.commands import run_case
from benchmarks.engine.limits import missed
from benchmarks.engine.results import Entry, load
from tests import PROJECT
from tests.benchmarks.runs import changed, run_of

MODEL = PROJECT / "tests" / "quasar_kernels" / "layer" / "quasar_model"


@pytest.mark.slow
def test_the_layer_in_a_model_is_compared_with_its_formula(tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    arguments = ["--model", str(MODEL), "--device", "cpu", "--out", str(out)]
    assert run_case(quasar_model, arguments) == 0
    run = load(out)
    assert [entry.of["dtype"] for entry in run.entries] == ["float64", "float32"]
    # of 157 parameters, those of four f_proj get no gradient
    assert {entry.figures["gradients"] for entry in run.entries} == {151}
    assert missed(quasar_model.limits(run)) == []
    worse = changed(run, "errors", "errors/logits", 1e-3, dtype="float32")
    (line,) = missed(quasar_model.limits(worse))
    assert "float32, logits" in line


def test_gla_layers_that_take_more_than_a_tenth_of_a_step_are_named() -> None:
    figures = {"step_ms": 100.0, "gla_ms": 7.5, "head_ms": 50.0}
    run = run_of(
        "quasar_model", Entry(table="steps", of={"tokens": 8192}, by="ours", figures=figures)
    )
    (line,) = missed(quasar_model.limits(run))
    # four groups of 50 ms and a head of 50 ms
    assert (
        line == "GLA layers' share of a step of 24 layers (computed), 8,192 tokens: 0.12, limit 0.1"
    )


def test_a_folder_without_a_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"--model {tmp_path} has no __init__.py"):
        quasar_model.load_code(tmp_path)
