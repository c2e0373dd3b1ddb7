"""The figures of training steps: their table, their limits, and their place in the document."""

from __future__ import annotations

import pytest

from benchmarks.cases.layer_training import IMPLEMENTATIONS, SHAPES, limits
from benchmarks.engine.results import DATA, Entry, Run, load
from benchmarks.report.layer_tables import training
from tests.benchmarks.runs import run_of

SHORT, LONG = SHAPES[:2]


def steps(
    graphs: int = 1 << 29, step_ms: float = 4, error: float = 1e-2, equal: bool = True
) -> Run:
    """Return a run in which ours takes 4 ms a step of the baseline's 10, and 1.5 GiB of its 2."""
    ours = {
        "forward_ms": 1,
        "step_ms": step_ms,
        "peak_bytes": 5 << 28,
        "graph_bytes": graphs,
        "workspace_bytes": 1 << 28,
        "reruns_equal": equal,
    }
    baseline = {
        "forward_ms": 3,
        "step_ms": 10,
        "peak_bytes": 2 << 30,
        "graph_bytes": 0,
        "workspace_bytes": 0,
    }
    costs = {"ours": ours, "baseline": baseline}
    entries = [
        Entry(table="steps", of=shape._asdict(), by=name, figures=figures)
        for shape in (SHORT, LONG)
        for name, figures in costs.items()
    ]
    worst = Entry(table="gradients", of=LONG._asdict(), by="ours", errors={"x": error})
    return run_of("layer_training", worst, *entries)


def test_the_table_compares_ours_with_the_baseline() -> None:
    text = training(steps())
    numbers = "1.00 | 4.00 | 3.00 | 10.00 | 2.50 | 1.50 / 2.00 | 0.50"
    assert f"| 512 wide, 8 x 64, 1 x 65,536 | {numbers} |" in text
    assert "`x` | 1.0e-02" in text
    assert text.startswith("made up (`python -m benchmarks layer_training`")


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, 0),
        ({"graphs": (1 << 30) + 1}, 2),
        ({"step_ms": 4.01}, 2),
        ({"error": 3e-2}, 1),
        ({"equal": False}, 1),
    ],
)
def test_a_figure_outside_of_its_limit_is_missed(changes: dict[str, float], missed: int) -> None:
    verdicts = [criterion.cells()[3] for criterion in limits(steps(**changes))]  # type: ignore[arg-type]
    assert verdicts.count("missed") == missed


def test_the_shapes_are_those_of_a_training_step_of_every_kind() -> None:
    sizes = [s.batch * s.tokens * s.hidden_size for s in SHAPES]
    assert min(sizes) <= 1 << 23 < max(sizes)  # replayed with nothing kept, and beyond
    assert {s.head_dim for s in SHAPES} == {64, 128}
    assert all(s.num_heads * s.head_dim == s.hidden_size for s in SHAPES)


def test_the_committed_run_covers_every_shape() -> None:
    run = load(DATA / "layer-training.json")
    rows = run.rows("steps")
    assert [row.of for row in rows] == [shape._asdict() for shape in SHAPES]
    assert all(row.by.keys() == IMPLEMENTATIONS.keys() for row in rows)
    widths = {entry.of["hidden_size"] for entry in run.table("gradients")}
    assert widths == {shape.hidden_size for shape in SHAPES}
