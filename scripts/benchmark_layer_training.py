"""Time training steps of the layer on this GPU, ours and the peer's in one run.

    python scripts/benchmark_layer_training.py --fork PATH --out benchmarks/h200/layer-training.json

PATH is a checkout of the public fork. Ours is the overlay, the peer the fork's layer over
flash-linear-attention's delta rule; each runs in a process of its own, one after the other. Ours is
checked first: gradients against float64, and two steps bit for bit. Most of the time goes into the
peer's many variants, which are compiled side by side beforehand.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmark_fork import TREES, make_tree
from measuring import operator_bench as bench
from measuring.layer_training import SHAPES, Cost, Shape, Training, TrainingRow, WorstGradient
from measuring.results import project_commit, write
from torch import Tensor

from harness.environment import describe
from harness.timing import recording
from harness.worker import load_tree
from quasar_kernels.reference import quasar_chunked, quasar_layer, relative_rms

DEVICE = torch.device("cuda")
IMPLEMENTATIONS = {"ours": "overlay", "peer": "peer"}
"""benchmark_fork.py's tree of each implementation."""
CHECKED_TOKENS = 2500
"""Tokens of each of two sequences whose gradients are compared with float64."""

PROTOCOL = """\
A step is the layer's forward and backward pass under bf16 autocast, with gradients of the input, \
which is fp32, and of all parameters; gradients are set to None before it. Times are medians of 11 \
runs of steps in a row, by the host's clock between synchronizes, after the same for 0.2 s. Memory \
is the peak of what is allocated during a step, parameters and input included. The peer is the \
public fork's layer over flash-linear-attention's `chunk_delta_rule`; both run on one machine, one \
after the other."""


def say(text: object) -> None:
    """Report progress, with the seconds since the start."""
    print(f"{time.perf_counter() - START:6.1f} s  {text}", file=sys.stderr, flush=True)


def new(layer_class: type, shape: Shape) -> Any:
    """Return a layer of this shape with default weights."""
    torch.manual_seed(0)
    D, H, S = shape[:3]
    return layer_class(hidden_size=D, num_heads=H, head_dim=S).to(DEVICE)


def step(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Run one training step; return the gradients by name."""
    leaves = {"x": x} | dict(layer.named_parameters())
    for leaf in leaves.values():
        leaf.grad = None
    with recording(DEVICE):
        y = layer(x)[0]
    torch.autograd.backward(y, dy)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def inputs(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return an input and a gradient of the output, as autocast gives it."""
    size = (shape.batch, shape.tokens, shape.hidden_size)
    x, dy = (torch.randn(size, device=DEVICE) for _ in range(2))
    return x.requires_grad_(), dy.bfloat16()


def forward(layer: Any, x: Tensor) -> None:
    """Run the forward pass, recorded."""
    with recording(DEVICE):
        layer(x)


def cost(layer: Any, shape: Shape) -> tuple[Cost, bool]:
    """Return what a step of this shape costs, and whether two give the same bits."""
    x, dy = inputs(shape)
    first, second = (step(layer, x, dy) for _ in range(2))
    equal = all(torch.equal(first[name], second[name]) for name in first)
    del first, second
    step_ms = bench.eager_ms(lambda: step(layer, x, dy))
    torch.cuda.reset_peak_memory_stats()
    step(layer, x, dy)
    peak = torch.cuda.max_memory_allocated()
    forward_ms = bench.eager_ms(partial(forward, layer, x))
    return Cost(forward_ms=forward_ms, step_ms=step_ms, peak_bytes=peak), equal


def worst_gradient(layer: Any, shape: Shape) -> WorstGradient:
    """Compare all gradients of a few tokens with float64 autograd."""
    few = shape._replace(batch=2, tokens=CHECKED_TOKENS)
    x, dy = inputs(few)
    bench.poison()
    found = step(layer, x, dy)
    wide = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    wide_x = x.detach().double().requires_grad_()
    operator = partial(quasar_chunked, chunk=256)
    y = quasar_layer(
        wide, wide_x, num_heads=few.num_heads, head_dim=few.head_dim, operator=operator
    )
    torch.autograd.backward(y, dy.double())
    errors = {name: relative_rms(found[name], w.grad) for name, w in (wide | {"x": wide_x}).items()}
    name = max(errors, key=lambda name: errors[name])
    return WorstGradient(shape=few, name=name, error=errors[name])


def measure(name: str, tree: Path) -> dict[str, list[Any]]:
    """Measure one implementation, in this process."""
    layer_class = load_tree(tree).layer_class
    gradients: dict[int, WorstGradient] = {}
    rows: list[Any] = []
    bench.soak(1)
    for shape in SHAPES:
        layer = new(layer_class, shape)
        if name == "ours" and shape.hidden_size not in gradients:
            gradients[shape.hidden_size] = worst_gradient(layer, shape)
            say(gradients[shape.hidden_size])
        found, equal = cost(layer, shape)
        say(f"{name}: {shape.label()}: {found}")
        rows.append((found.model_dump(), equal))
        del layer
        gc.collect()
        torch.cuda.empty_cache()
    return {"rows": rows, "gradients": [g.model_dump() for g in gradients.values()]}


def compile_side_by_side(tree: Path) -> None:
    """Run a step of each shape, each in a process of its own, so that all kernels are compiled.

    flash-linear-attention would also keep what it found the fastest variants, which is of no use
    while others are at work: FLA_CACHE_RESULTS=0 keeps it from that.
    """
    environ = os.environ | {"FLA_CACHE_RESULTS": "0"}
    commands = (
        [sys.executable, __file__, "--compile", str(tree), str(i)] for i in range(len(SHAPES))
    )
    for process in [subprocess.Popen(command, env=environ) for command in commands]:
        process.wait()


def compile_shape(tree: Path, shape: Shape) -> None:
    """Run one step of this shape."""
    layer = new(load_tree(tree).layer_class, shape)
    step(layer, *inputs(shape))
    torch.cuda.synchronize()
    say(f"compiled: {shape.label()}")


def in_own_process(name: str, fork: Path, folder: Path) -> Mapping[str, Any]:
    """Measure one implementation in a process of its own."""
    tree = make_tree(fork, folder / name, TREES[IMPLEMENTATIONS[name]])
    if name == "peer":
        compile_side_by_side(tree)
    out = folder / f"{name}.json"
    command = [sys.executable, __file__, "--child", name, str(tree), str(out)]
    subprocess.run(command, check=True)
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
        created=datetime.now(timezone.utc).date(),
        commit=commit or project_commit(),
        environment=describe(DEVICE),
        protocol=PROTOCOL,
        rows=tuple(rows),
        gradients=tuple(WorstGradient(**g) for g in found["ours"]["gradients"]),
    )


def main() -> None:
    """Benchmark both and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fork", type=Path, help="checkout of the public fork")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="this project's commit, where git cannot tell")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, tree, out = args.child
        Path(out).write_text(json.dumps(measure(name, Path(tree))))
        return
    if args.compile:
        tree, number = args.compile
        compile_shape(Path(tree), SHAPES[int(number)])
        return
    if args.fork is None or args.out is None:
        parser.error("--fork and --out are needed")
    write(args.out, benchmark(args.fork, args.commit))


START = time.perf_counter()

if __name__ == "__main__":
    main()
