"""The layer's peak memory by length: recorded by autograd, without gradients, and in training.

    python -m benchmarks layer_memory --out benchmarks/h200/layer-memory.json

`--tree overlay-portable` measures the layer without the instructions that only Hopper has.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from benchmarks.cases import trees
from benchmarks.cases.layer_calls import DEVICE, output, step
from benchmarks.cases.layer_training import Shape, new
from benchmarks.engine import clocks
from benchmarks.engine.results import Entry, Run, start
from quasar_kernels.memory import Way

WIDTHS = ((512, 8, 64), (1024, 16, 64), (2048, 16, 128))
"""Channels, heads and their width."""
LENGTHS = (100_000, 262_144, 500_000, 1_000_000)
MAX_ELEMENTS = 1 << 29
"""Largest input, in elements: a million tokens of 512 channels."""
CALLS = 3
"""Calls of each measurement. All inputs are too long for CUDA graphs."""
WAYS: tuple[Way, ...] = ("recorded", "no_grad", "training")
PROTOCOL = """\
QuasarAttention on fp32 input `[1, T, hidden]` under bf16 autocast. `recorded`: calls as a \
validator times them, with the previous output still in memory; `no_grad`: the same without \
gradients; \
`training`: forward and backward pass with gradients of input and parameters. Three calls each, \
after the allocator's cache was emptied. `peak_bytes` is the most memory that tensors took, input \
and parameters included; `reserved_bytes` is the most that the allocator held, CUDA graphs \
included."""


def calls(layer: Any, shape: Shape, way: Way) -> None:
    x = torch.randn(1, shape.tokens, shape.hidden_size, device=DEVICE)
    dy = None
    if way == "training":
        x.requires_grad_()
        dy = torch.randn_like(x, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    with torch.set_grad_enabled(way != "no_grad"):
        for _ in range(CALLS):
            if dy is None:
                _previous = output(layer, x)
            else:
                step(layer, x, dy)
    torch.cuda.synchronize()


def peak(layer_class: type, shape: Shape, way: Way) -> Entry:
    clocks.free()
    layer = new(layer_class, shape)
    of = {**shape._asdict(), "way": way}
    try:
        calls(layer, shape, way)
    except torch.cuda.OutOfMemoryError as error:
        return Entry(table="peaks", of=of, failure=f"out_of_memory: {error}")
    figures = {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    return Entry(table="peaks", of=of, figures=figures)


options = trees.options


def peaks(layer_class: type, width: tuple[int, int, int]) -> Iterator[Entry]:
    """Yield the peaks of every way and length of a layer of this width."""
    for way in WAYS:
        for n in LENGTHS:
            if n * width[0] <= MAX_ELEMENTS:
                yield peak(layer_class, Shape(*width, 1, n), way)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    run = start("layer_memory", PROTOCOL, args.commit, settings={"tree": args.tree})
    with trees.loaded(args.fork, trees.TREES[args.tree]) as tree:
        every = (peaks(tree.layer_class, width) for width in WIDTHS)
        yield from run.growing(chain.from_iterable(every))
