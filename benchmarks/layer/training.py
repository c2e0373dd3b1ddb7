"""Time training steps of the layer on this GPU, ours and the peer's in one run.

    python -m benchmarks.layer.training --fork PATH --out benchmarks/h200/layer-training.json

PATH is a checkout of the public fork. Ours is the overlay, the peer the fork's layer over
flash-linear-attention's delta rule; each runs in a process of its own, one after the other. Ours is
checked first: gradients against float64, and two steps bit for bit. Most of the time goes into the
peer's many variants, which are compiled side by side beforehand.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import autotuning, compiling
from benchmarks.engine import clocks, commands
from benchmarks.engine.commands import say
from benchmarks.layer.calls import DEVICE, gradient_errors, output, step
from benchmarks.layer.training_results import (
    SHAPES,
    Cost,
    Shape,
    Training,
    TrainingRow,
    WorstGradient,
)
from benchmarks.layer.trees import TREES, make_tree
from benchmarks.results import origin, write
from harness.worker.subject.tree import load_tree

MODULE = "benchmarks.layer.training"
IMPLEMENTATIONS = {"ours": "overlay", "peer": "peer"}
"""The tree of each implementation."""
RUN_MS = 100
"""Of a run of steps: in one step alone the host's start and the GPU's end would count as well."""
CHECKED_TOKENS = 2500
"""Tokens of each of two sequences whose gradients are compared with float64."""

PROTOCOL = """\
A step is the layer's forward and backward pass under bf16 autocast, with gradients of the input, \
which is fp32, and of all parameters; gradients are set to None before it. Times are medians of \
11 runs of steps in a row, a tenth of a second each, by the host's clock between synchronizes, \
after the same for 0.2 s. Memory is the peak of what is allocated during a step, parameters and \
input included, and what CUDA graphs hold beside it, which all layers of a model share; without \
the workspaces of cuBLAS, 32 MiB once a process for each thread and stream that multiplies. The \
peer is the public fork's layer over flash-linear-attention's `chunk_delta_rule`, whose variants \
are timed for 10 ms each to choose the fastest; both run on one machine, one after the other."""


def new(layer_class: type, shape: Shape) -> Any:
    """Return a layer of this shape with default weights."""
    torch.manual_seed(0)
    D, H, S = shape[:3]
    return layer_class(hidden_size=D, num_heads=H, head_dim=S).to(DEVICE)


def inputs(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return an input and a gradient of the output, as autocast gives it."""
    size = (shape.batch, shape.tokens, shape.hidden_size)
    x, dy = (torch.randn(size, device=DEVICE) for _ in range(2))
    return x.requires_grad_(), dy.bfloat16()


def cost(layer: Any, shape: Shape) -> tuple[Cost, bool]:
    """Return what a step of this shape costs, and whether two give the same bits."""
    x, dy = inputs(shape)
    first, second = (step(layer, x, dy) for _ in range(2))
    equal = all(torch.equal(first[name], second[name]) for name in first)
    del first, second
    step_ms = clocks.eager_ms(partial(step, layer, x, dy), least_ms=RUN_MS)
    torch.cuda.reset_peak_memory_stats()
    step(layer, x, dy)
    peak = torch.cuda.max_memory_allocated()
    graphs = clocks.graph_bytes()
    forward_ms = clocks.eager_ms(partial(output, layer, x), least_ms=RUN_MS)
    found = Cost(
        forward_ms=forward_ms,
        step_ms=step_ms,
        peak_bytes=peak,
        graph_bytes=graphs,
        workspace_bytes=clocks.free_workspaces(),
    )
    return found, equal


def worst_gradient(layer: Any, shape: Shape) -> WorstGradient:
    """Compare all gradients of a few tokens with float64 autograd."""
    few = shape._replace(batch=2, tokens=CHECKED_TOKENS)
    x, dy = inputs(few)
    clocks.poison()
    errors = gradient_errors(layer, x, dy, few.num_heads, few.head_dim)
    name = max(errors, key=lambda name: errors[name])
    return WorstGradient(shape=few, name=name, error=errors[name])


def measure(name: str, tree: Path) -> dict[str, list[Any]]:
    """Measure one implementation, in this process."""
    layer_class = load_tree(tree).layer_class
    gradients: dict[int, WorstGradient] = {}
    rows: list[Any] = []
    clocks.soak(1)
    for shape in SHAPES:
        layer = new(layer_class, shape)
        with autotuning.brief():
            step(layer, *inputs(shape))
        if name == "ours" and shape.hidden_size not in gradients:
            gradients[shape.hidden_size] = worst_gradient(layer, shape)
            say(gradients[shape.hidden_size])
        found, equal = cost(layer, shape)
        say(f"{name}: {shape.label()}: {found}")
        rows.append((found.model_dump(), equal))
        del layer
        clocks.free()
    return {"rows": rows, "gradients": [g.model_dump() for g in gradients.values()]}


def compile_share(tree: Path) -> None:
    """Run one step of every shape, over a few tokens."""
    layer_class = load_tree(tree).layer_class
    for shape in SHAPES:
        few = shape._replace(tokens=min(shape.tokens, compiling.TOKENS))
        compiling.attempt(few, partial(step_once, layer_class, few))
    torch.cuda.synchronize()


def step_once(layer_class: type, shape: Shape) -> None:
    """Run one step of a new layer."""
    step(new(layer_class, shape), *inputs(shape))


def in_own_process(name: str, fork: Path, folder: Path) -> Mapping[str, Any]:
    """Measure one implementation in a process of its own."""
    tree = make_tree(fork, folder / name, TREES[IMPLEMENTATIONS[name]])
    if name == "peer":
        compiling.side_by_side(MODULE, tree)
    out = folder / f"{name}.json"
    subprocess.run(commands.python(MODULE, "--child", name, tree, out), check=True)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def benchmark(fork: Path, commit: str | None) -> Training:
    """Measure both implementations."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        found = {name: in_own_process(name, fork, folder) for name in IMPLEMENTATIONS}
    rows = [
        TrainingRow(
            shape=shape,
            costs={name: Cost(**results["rows"][i][0]) for name, results in found.items()},
            reruns_equal=found["ours"]["rows"][i][1],
        )
        for i, shape in enumerate(SHAPES)
    ]
    return Training(
        **origin(commit),
        protocol=PROTOCOL,
        rows=tuple(rows),
        gradients=tuple(WorstGradient(**g) for g in found["ours"]["gradients"]),
    )


def main() -> None:
    """Benchmark both and write the file."""
    match sys.argv[1:]:
        case ["--child", name, tree, out]:  # what in_own_process starts
            Path(out).write_text(json.dumps(measure(name, Path(tree))))
        case [compiling.FLAG, tree, *share]:
            with compiling.Share.parse(share).of_variants():
                compile_share(Path(tree))
        case _:
            args = commands.options(__doc__, fork=True).parse_args()
            write(args.out, benchmark(args.fork, args.commit))


if __name__ == "__main__":
    main()
