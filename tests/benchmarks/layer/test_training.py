"""The figures of training steps: their tables, their limits, and their place in the documents."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from benchmarks.layer.page import document, load_runs
from benchmarks.layer.training import IMPLEMENTATIONS
from benchmarks.layer.training_results import (
    SHAPES,
    Cost,
    Training,
    TrainingRow,
    WorstGradient,
    training_criteria,
    training_tables,
)
from benchmarks.results import load, write
from tests.harness.samples import environment

SHORT, LONG = SHAPES[:2]


def training(
    graphs: int = 1 << 29, step_ms: float = 4, error: float = 1e-2, equal: bool = True
) -> Training:
    """Return a run in which ours takes 4 ms a step of the peer's 10, and 1.5 GiB of its 2."""
    costs = {
        "ours": Cost(
            forward_ms=1,
            step_ms=step_ms,
            peak_bytes=5 << 28,
            graph_bytes=graphs,
            workspace_bytes=1 << 28,
        ),
        "peer": Cost(forward_ms=3, step_ms=10, peak_bytes=2 << 30),
    }
    return Training(
        created=date(2026, 1, 2),
        commit="abc",
        environment=environment(gpu="NVIDIA H200"),
        protocol="Steps in a row.",
        rows=tuple(TrainingRow(shape=s, costs=costs, reruns_equal=equal) for s in (SHORT, LONG)),
        gradients=(WorstGradient(shape=LONG, name="x", error=error),),
    )


def verdicts(run: Training) -> list[str]:
    return [criterion.cells()[3] for criterion in training_criteria(run)]


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "run.json", training())
    assert load(Training, tmp_path / "run.json") == training()


def test_the_tables_say_how_ours_compares() -> None:
    text = training_tables(training())
    assert (
        "| 512 wide, 8 x 64, 1 x 65,536 | 1.00 | 4.00 | 3.00 | 10.00 | 2.50 | 1.50 / 2.00 | 0.50 |"
        in text
    )
    assert "`x` | 1.0e-02" in text
    assert text.startswith("Steps in a row. (NVIDIA H200, ")
    assert text in document(load_runs()._replace(training=training()))


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, 0),
        ({"graphs": (1 << 30) + 1}, 2),
        ({"step_ms": 4.01}, 2),
        ({"error": 3e-2}, 1),
        ({"error": float("inf")}, None),
        ({"equal": False}, 1),
    ],
)
def test_what_is_outside_of_a_limit_is_missed(
    changed: dict[str, float], missed: int | None
) -> None:
    if missed is None:
        with pytest.raises(ValueError, match="finite"):
            training(**changed)  # type: ignore[arg-type]
        return
    assert verdicts(training(**changed)).count("missed") == missed  # type: ignore[arg-type]


def test_the_shapes_are_those_of_a_training_step_of_every_kind() -> None:
    sizes = [s.batch * s.tokens * s.hidden_size for s in SHAPES]
    assert min(sizes) <= 1 << 23 < max(sizes)  # replayed with nothing kept, and beyond
    assert {s.head_dim for s in SHAPES} == {64, 128}
    assert all(s.num_heads * s.head_dim == s.hidden_size for s in SHAPES)


def test_the_committed_run_covers_every_shape_and_what_it_misses_is_said() -> None:
    runs = load_runs()
    run = runs.training
    assert tuple(row.shape for row in run.rows) == SHAPES
    assert all(row.costs.keys() == IMPLEMENTATIONS.keys() for row in run.rows)
    assert {g.shape.hidden_size for g in run.gradients} == {s.hidden_size for s in SHAPES}
    page = document(runs)
    for what, *_, verdict in (criterion.cells() for criterion in training_criteria(run)):
        assert (f"- {what}: " in page) == (verdict == "missed")
