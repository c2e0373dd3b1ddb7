"""Time WKV6's Triton kernels with other tiles and segments, to choose them for a GPU.

    python -m benchmarks.wkv6.tiles [--tokens N ...]

Each candidate differs from the shipped choice in what its name says. Graph replay, milliseconds;
a candidate that does not compile or launch says why.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.clocks import graph_ms, soak
from benchmarks.operator.training_results import Shape
from benchmarks.wkv6.calls import Function, Inputs, draw, gradients
from quasar_kernels.blocks.triton_segments.plan import Tiles, Walk
from quasar_kernels.blocks.wkv6_triton.launch import tiles_for, wkv6_triton
from quasar_kernels.mount import mount

TOKENS = (256, 2048, 65_536)
HEADS, WIDTH = 8, 64
WALKS = (Walk(2, 2), Walk(4, 1), Walk(4, 2), Walk(4, 3), Walk(8, 1), Walk(8, 2))
SEGMENT_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def candidates(shipped: Tiles) -> Iterator[tuple[str, str, Tiles]]:
    """Yield which way a candidate concerns, its name and its tiles."""
    yield "both", "shipped", shipped
    for chunk in (16, 64):
        yield "both", f"chunks of {chunk}", shipped._replace(chunk=chunk)
    yield "both", "32 columns", shipped._replace(values=32)
    for walk in WALKS:
        name = f"{walk.warps} warps, {walk.stages} stages"
        if walk != shipped.sum:
            yield "forward", f"sums: {name}", shipped._replace(sum=walk)
        if walk != shipped.output:
            yield "forward", f"outputs: {name}", shipped._replace(output=walk)
        if walk != shipped.gradient:
            yield "backward", f"gradients: {name}", shipped._replace(gradient=walk)
        if walk.stages < 3:
            small = shipped._replace(chunk=16, gradient=walk)
            yield "backward", f"chunks of 16, gradients: {name}", small


def time_of(call: Callable[[], object]) -> str:
    """Return a call's milliseconds, or why there are none."""
    try:
        return f"{graph_ms(call, repeats=5, warm=0.05):.3f}"
    except Exception as error:  # a compiler's or a launch's, whatever it is
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]


def report(way: str, name: str, function: Function, x: Inputs, do: Tensor) -> None:
    """Print what a candidate takes in the ways that it concerns."""
    tokens = x.v.shape[1]
    if way != "backward":
        print(f"{tokens:9,} forward   {name:44} {time_of(partial(function, *x))}", flush=True)
    if way != "forward":
        call = partial(gradients, function, x, do)
        print(f"{tokens:9,} and back  {name:44} {time_of(call)}", flush=True)


def main() -> None:
    """Time every candidate, and every length of segments, at every length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    args = parser.parse_args()
    mount()
    torch.manual_seed(0)
    soak(1)
    shipped = tiles_for(WIDTH, WIDTH, torch.bfloat16)
    for tokens in args.tokens:
        x = draw(Shape(1, tokens, HEADS, WIDTH))
        do = torch.randn_like(x.v)

        for way, name, tiles in candidates(shipped):
            report(way, name, partial(wkv6_triton, tiles=tiles), x, do)
        for length in SEGMENT_TOKENS:
            if length <= tokens:
                cut = partial(wkv6_triton, segments=math.ceil(tokens / length))
                report("both", f"segments of {length}", cut, x, do)


if __name__ == "__main__":
    main()
