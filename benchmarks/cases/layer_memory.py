"""The layer's peak memory by length: recorded calls, calls without gradients, training steps.

    python -m benchmarks layer_memory --out benchmarks/h200/layer-memory.json

`--tree overlay-portable` measures it without Hopper's own instructions.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.layer_calls import DEVICE, output, step
from benchmarks.cases.layer_training import Shape, new
from benchmarks.cases.trees import TREES, make_tree
from benchmarks.engine import clocks, commands
from benchmarks.engine.results import Entry, Run, start
from harness.hardware.gpus import OTHERS_GIB
from harness.worker.subject.tree import load_tree
from quasar_kernels.memory import Way, largest_length

WIDTHS = ((512, 8, 64), (1024, 16, 64), (2048, 16, 128))
"""Channels, heads and their width."""
LENGTHS = (100_000, 262_144, 500_000, 1_000_000)
MOST_ELEMENTS = 1 << 29
"""Largest input, in elements: a million tokens of 512 channels."""
CALLS = 3
"""The second call may be captured as a CUDA graph, the third replays it."""
WAYS: tuple[Way, ...] = ("recorded", "no_grad", "training")
CARDS_GIB = (8, 12, 24)
"""Memory of the cards whose limit the allocator is given."""
SHARES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of that limit that the counted tensors take, largest first."""
PROTOCOL = """\
QuasarAttention on fp32 input `[1, T, hidden]` under bf16 autocast. `recorded`: calls as a \
validator times them, the previous output alive; `no_grad`: the same without gradients; \
`training`: forward and backward pass with gradients of input and parameters. Three calls each in \
an allocator without cached memory; `peak_bytes` are allocated, input and parameters included, \
`reserved_bytes` what the process holds of the GPU for tensors, CUDA graphs included. Limits: \
torch's allocator may take what the contexts leave of a card's memory; a call is as long as the \
counted bytes allow in a share of that, and the largest share at which the calls succeed counts."""


def calls(layer: Any, shape: Shape, way: Way) -> None:
    """Call the layer a few times in one way."""
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
    """Return the peaks of calls of a layer of its own."""
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


def limit(layer_class: type, way: Way, card_gib: float, *, fused: bool) -> Entry:
    """Return the largest share of a card's memory whose calls succeed within its limit."""
    usable = (card_gib - OTHERS_GIB) * 2**30
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    of = {"way": way, "card_gib": card_gib}
    torch.cuda.set_per_process_memory_fraction(usable / total)
    try:
        for share in SHARES:
            tokens = largest_length(share * usable, way, fused=fused)
            shape = Shape(*WIDTHS[0], 1, tokens)
            if not peak(layer_class, shape, way).failure:
                return Entry(table="limits", of=of, figures={"share": share, "tokens": tokens})
        return Entry(table="limits", of=of, failure="out_of_memory at every share")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def options(parser: argparse.ArgumentParser) -> None:
    """Add this case's options."""
    commands.fork_option(parser, required=False)
    parser.add_argument("--tree", choices=TREES, default="overlay")


def peaks(layer_class: type, width: tuple[int, int, int]) -> Iterator[Entry]:
    """Yield the peaks of every way and length of a layer of this width."""
    for way in WAYS:
        for n in LENGTHS:
            if n * width[0] <= MOST_ELEMENTS:
                yield peak(layer_class, Shape(*width, 1, n), way)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    """Measure one tree; yield what there is after each entry."""
    tree = TREES[args.tree]
    run = start("layer_memory", PROTOCOL, args.commit, settings={"tree": args.tree})
    with tempfile.TemporaryDirectory() as folder:
        layer_class = load_tree(make_tree(args.fork, Path(folder).resolve(), tree)).layer_class
        fused = not tree.portable and torch.cuda.get_device_capability() == (9, 0)
        first, *others = WIDTHS
        entries = chain(
            peaks(layer_class, first),
            (limit(layer_class, way, card, fused=fused) for way in WAYS for card in CARDS_GIB),
            *(peaks(layer_class, width) for width in others),
        )
        for entry in entries:
            run = run.adding(entry)
            yield run


def tables(run: Run) -> str:
    """Return a line for each entry."""
    return "\n".join(
        " ".join([*map(str, e.of.values()), *(f"{k} {v:,}" for k, v in e.figures.items())])
        + (e.failure or "")
        for e in run.entries
    )
