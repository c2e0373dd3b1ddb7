"""Forward passes and training steps on this GPU, of this project's layer and the baseline.

    python -m benchmarks layer_training --fork PATH --out benchmarks/h200/layer-training.json

PATH is a checkout of the public fork. `ours` is the overlay. The baseline is the fork's layer with
fla's delta rule as operator. Each runs in a fresh process, one after the other. The overlay is
checked first: its gradients against float64, and two steps for equal bits.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases.layer_accuracy import GRADIENT_ERROR
from benchmarks.cases.layer_calls import (
    DEVICE,
    exact,
    gradient_errors,
    inputs,
    output,
    shape_label,
    step,
)
from benchmarks.cases.trees import TREES, make_tree
from benchmarks.engine import clocks, commands, processes
from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Row, Run, start
from harness.worker.subject.tree import load_tree


class Shape(NamedTuple):
    """A layer and its input `[batch, tokens, hidden_size]`."""

    hidden_size: int
    num_heads: int
    head_dim: int
    batch: int
    tokens: int

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return an input and the gradient of the output."""
        return inputs(self.batch, self.tokens, self.hidden_size)

    def label(self) -> str:
        return shape_label(*self)


SHAPES = (
    Shape(512, 8, 64, 4, 2048),
    Shape(512, 8, 64, 1, 65_536),
    Shape(512, 8, 64, 16, 4096),
    Shape(1024, 16, 64, 1, 131_072),
    Shape(2048, 16, 128, 1, 16_384),
    Shape(2048, 16, 128, 4, 4096),
)

LEADS = {
    "step_ms": {512: 2.5, 1024: 2.5, 2048: 2.0},
    "forward_ms": {512: 2.5, 1024: 3.3, 2048: 2.0},
}
"""Least speed-up over the baseline, by the layer's width, of a step and of a forward pass that
records gradients."""

IMPLEMENTATIONS = {"ours": "overlay", "baseline": "baseline"}
"""The tree of each implementation."""
RUN_MS = 100
"""Least duration of a run of steps, so that its start and end have little effect."""
CHECKED_TOKENS = 2500
"""Tokens of each of two sequences for which gradients are compared with float64."""

PROTOCOL = """\
A forward pass records gradients. A step is the layer's forward and backward pass under bf16 \
autocast, with gradients of the input, which is fp32, and of all parameters. Times are medians of \
11 runs of passes or steps in a row, a tenth of a second each, by the host's clock between \
synchronizes, after 0.2 s of the same. Memory is the peak of what is allocated during a step, \
parameters, input and CUDA graphs included; without the workspaces of cuBLAS, 32 MiB once a \
process for each thread and stream that multiplies. The baseline is the public fork's layer over \
fla's `chunk_delta_rule`."""


def new(layer_class: type, shape: Shape) -> Any:
    torch.manual_seed(0)
    D, H, S = shape[:3]
    return layer_class(hidden_size=D, num_heads=H, head_dim=S).to(DEVICE)


def cost(layer: Any, shape: Shape) -> dict[str, float]:
    """Return the cost of a step of this shape, and whether two steps give the same bits."""
    x, dy = shape.inputs()
    first, second = (step(layer, x, dy) for _ in range(2))
    equal = all(torch.equal(first[name], second[name]) for name in first)
    del first, second
    step_ms = clocks.eager_ms(partial(step, layer, x, dy), least_ms=RUN_MS)
    torch.cuda.reset_peak_memory_stats()
    step(layer, x, dy)
    peak = torch.cuda.max_memory_allocated()
    graphs = clocks.graph_bytes()
    forward_ms = clocks.eager_ms(partial(output, layer, x), least_ms=RUN_MS)
    return {
        "forward_ms": forward_ms,
        "step_ms": step_ms,
        "peak_bytes": peak,
        "graph_bytes": graphs,
        "workspace_bytes": clocks.free_workspaces(),
        "reruns_equal": equal,
    }


def worst_gradient(layer: Any, shape: Shape) -> Entry:
    """Compare all gradients of a few tokens with float64 autograd."""
    few = shape._replace(batch=2, tokens=CHECKED_TOKENS)
    clocks.poison()
    errors = gradient_errors(
        layer, *few.inputs(), lambda weights, x: exact(weights, x, few.num_heads, few.head_dim)
    )
    name = max(errors, key=lambda name: errors[name])
    return Entry(table="gradients", of=few._asdict(), by="ours", errors={name: errors[name]})


def implementation(name: str, tree: Path) -> Iterator[Entry]:
    layer_class = load_tree(tree).layer_class
    checked = set()
    clocks.soak(1)
    for shape in SHAPES:
        layer = new(layer_class, shape)
        step(layer, *shape.inputs())  # compiles, and chooses among variants
        if name == "ours" and shape.hidden_size not in checked:
            checked.add(shape.hidden_size)
            yield worst_gradient(layer, shape)
        yield Entry(table="steps", of=shape._asdict(), by=name, figures=cost(layer, shape))
        del layer
        clocks.free()


options = commands.fork_option


def measure(args: argparse.Namespace) -> Iterator[Run]:
    run: Run = processes.call(start, "layer_training", PROTOCOL, args.commit)
    with tempfile.TemporaryDirectory() as folder:
        trees = {
            name: make_tree(args.fork, Path(folder).resolve() / name, TREES[kind])
            for name, kind in IMPLEMENTATIONS.items()
        }
        streams = (processes.stream(implementation, *each) for each in trees.items())
        yield from run.growing(chain.from_iterable(streams))


def memory(row: Row, name: str) -> float:
    """Return the bytes of GPU memory that a step needs, without cuBLAS's workspaces."""
    of = row.by[name].figures
    return of["peak_bytes"] + of["graph_bytes"] - of["workspace_bytes"]


def limits(run: Run) -> Iterator[Criterion]:
    rows = [(row, Shape(**row.of)) for row in run.rows("steps")]
    for figure, what in (("step_ms", "training step"), ("forward_ms", "forward pass")):
        for row, shape in rows:
            lead = row.ratio(figure, "baseline", "ours") or 0
            least = LEADS[figure][shape.hidden_size]
            label = f"{what}, {shape.label()}, times the baseline's speed"
            yield Criterion(label, lead, least, True)
    for row, shape in rows:
        overlay, baseline = memory(row, "ours"), memory(row, "baseline")
        what = f"training step, {shape.label()}, memory, GB"
        yield Criterion(what, overlay, baseline, scale=1e-9)
    for entry in run.table("gradients"):
        tensor, error = entry.worst()
        label = Shape(**entry.of).label()  # type: ignore[arg-type]
        what = f"training step, {label}, worst gradient (`{tensor}`), relative RMS"
        yield Criterion(what, error, GRADIENT_ERROR)
    unequal = sum(not row.figure("ours", "reruns_equal") for row, _ in rows)
    yield Criterion("training steps with a rerun that differs in a bit", unequal, 0)
