"""What training.py found, as models, and the tables made of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import Field

from benchmarks.engine.limits import Criterion
from benchmarks.layer.limits import GRADIENT_ERROR
from benchmarks.report.markdown import records, table
from benchmarks.results import Frozen, NotNegative, Positive, Run, versions


class Shape(NamedTuple):
    """A layer and its input `[batch, tokens, hidden_size]`."""

    hidden_size: int
    num_heads: int
    head_dim: int
    batch: int
    tokens: int

    def label(self) -> str:
        """Return the shape as the tables write it."""
        return (
            f"{self.hidden_size:,} wide, {self.num_heads} x {self.head_dim}, "
            f"{self.batch} x {self.tokens:,}"
        )


SHAPES = (
    Shape(512, 8, 64, 4, 2048),
    Shape(512, 8, 64, 1, 65_536),
    Shape(512, 8, 64, 16, 4096),
    Shape(1024, 16, 64, 1, 131_072),
    Shape(2048, 16, 128, 1, 16_384),
    Shape(2048, 16, 128, 4, 4096),
)

STEP_LEAD = {512: 2.5, 1024: 2.5, 2048: 1.5}
"""How many times faster than the peer's a step must be, by the layer's width."""


class Cost(Frozen):
    """What training steps cost with one implementation."""

    forward_ms: Positive = Field(description="the forward pass alone, recorded")
    step_ms: Positive = Field(description="forward and backward pass")
    peak_bytes: int = Field(description="max_memory_allocated of a step, input included")
    graph_bytes: int = Field(
        default=0, description="what CUDA graphs hold for themselves beside it"
    )

    workspace_bytes: int = Field(
        default=0, description="cuBLAS's part of both, once a process for each thread and stream"
    )

    @property
    def memory(self) -> int:
        """Bytes of GPU memory that a step needs, without cuBLAS's workspaces."""
        return self.peak_bytes + self.graph_bytes - self.workspace_bytes


class TrainingRow(Frozen):
    """One shape."""

    shape: Shape
    costs: dict[str, Cost] = Field(description="by implementation: ours, peer")
    reruns_equal: bool = Field(description="two steps of ours gave the same gradients bit for bit")


class WorstGradient(Frozen):
    """The gradient of ours that is farthest from float64, of x's and all parameters'."""

    shape: Shape
    name: str
    error: NotNegative = Field(description="relative RMS")


class Training(Run):
    """Training steps of the layer, on one GPU."""

    protocol: str
    rows: tuple[TrainingRow, ...]
    gradients: tuple[WorstGradient, ...]


def training_tables(training: Training) -> str:
    """Return the tables of costs and of errors, with how they were found."""
    machine = training.environment
    return "\n\n".join(
        [
            f"{training.protocol} ({machine.gpu}, driver {machine.driver}, {versions(machine)}; "
            f"`benchmarks.layer.training`, {training.created}, "
            f"commit {training.commit}.)",
            _costs(training),
            "The gradient of ours that is farthest from float64 autograd, relative RMS:",
            _errors(training),
        ]
    )


def _costs(training: Training) -> str:
    def cells(row: TrainingRow) -> dict[str, str]:
        ours, peer = row.costs["ours"], row.costs["peer"]
        return {
            "layer, input": row.shape.label(),
            "ours: forward, ms": f"{ours.forward_ms:.2f}",
            "ours: step, ms": f"{ours.step_ms:.2f}",
            "peer: forward, ms": f"{peer.forward_ms:.2f}",
            "peer: step, ms": f"{peer.step_ms:.2f}",
            "peer / ours": f"{peer.step_ms / ours.step_ms:.2f}",
            "memory, ours / peer, GiB": f"{ours.memory / 2**30:.2f} / {peer.memory / 2**30:.2f}",
            "graphs' part, GiB": f"{ours.graph_bytes / 2**30:.2f}",
            "reruns": "bitwise equal" if row.reruns_equal else "differ",
        }

    return records(map(cells, training.rows))


def _errors(training: Training) -> str:
    rows = [(g.shape.label(), f"`{g.name}`", f"{g.error:.1e}") for g in training.gradients]
    return table(("layer, input", "gradient of", "error"), rows)


def training_criteria(training: Training) -> Iterator[Criterion]:
    """Return every limit of training steps with its figure."""
    for row in training.rows:
        lead = row.costs["peer"].step_ms / row.costs["ours"].step_ms
        what = f"training step, {row.shape.label()}, times the peer's speed"
        yield Criterion(what, lead, STEP_LEAD[row.shape.hidden_size], True, digits=".2f")
    for row in training.rows:
        ours, peer = (row.costs[name].memory for name in ("ours", "peer"))
        what = f"training step, {row.shape.label()}, memory, GB"
        yield Criterion(what, ours, peer, scale=1e-9, digits=".2f")
    for found in training.gradients:
        what = f"training step, {found.shape.label()}, worst gradient (`{found.name}`)"
        yield Criterion(f"{what}, relative RMS", found.error, GRADIENT_ERROR, digits=".1e")
    unequal = sum(not row.reruns_equal for row in training.rows)
    yield Criterion("training steps whose rerun differs in a bit", unequal, 0)
