"""RWKV-6's operator: this project's kernels and fla's functions.

    python -m benchmarks wkv6 --out benchmarks/h200/wkv6.json

The case times the forward pass, and forward and backward, and compares outputs and gradients with
float64. `triton` and `cuda` are quasar_kernels.blocks.wkv6; `chunk_rwkv6` and
`fused_recurrent_rwkv6` are fla's, with the same arguments. Implementations that work token by token
are measured up to 16,384 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata

import torch
from torch import Tensor

from benchmarks.engine import clocks
from benchmarks.engine.comparison import (
    CHECKED,
    WAYS,
    Comparison,
    Function,
    Inputs,
    Shape,
    shape_of,
)
from benchmarks.engine.limits import GRADIENT_ERROR, OUTPUT_ERROR, Criterion
from benchmarks.engine.results import Run, start
from quasar_kernels.blocks.chunked import decayed_attention
from quasar_kernels.blocks.wkv6 import OPERATOR
from quasar_kernels.mount import mount

OURS, CHUNK, RECURRENT = ("triton", "cuda"), "chunk_rwkv6", "fused_recurrent_rwkv6"
NAMES = (*OURS, CHUNK, RECURRENT)
TOKENS = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
HEADS, WIDTH = 8, 64
CHECKED_TOKENS = 4096
"""Number of first tokens that are compared; more would not fit, as float64 autograd keeps all
tensors."""
RECURRENT_TOKENS = 16_384
"""Longest call of the kernels that work token by token."""
LEAD_AT, LEAD = Shape(1, 65_536, 8, 64), 1.5
"""Shape and least speed-up of Triton over fla's chunks, with graph replay."""

PROTOCOL = f"""\
One sequence, 8 heads of 64, r, k and v in bf16, log decays in fp32 as a fresh RWKV-6 layer has \
them with noise of half a unit. chunk_rwkv6 and fused_recurrent_rwkv6: fla's. Outputs, and \
gradients of all five inputs, are compared with float64 over the first 4,096 tokens. {CHECKED} \
{clocks.CLOCKS} Memory: the most that was allocated during a call, inputs included."""


def draw(shape: Shape, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Draw random inputs, with the decays of a new RWKV-6 layer plus noise.

    Such a layer spreads its channels' log rates from -6 to -1 (arXiv 2404.05892); here each token
    adds noise of half a unit.

    Returns:
        r, k, v `[B, T, H, S]` in `dtype`; log decays w of that shape and u `[H, S]` in fp32.
    """
    batch, tokens, heads, width = shape
    r, k, v = (torch.randn(batch, tokens, heads, width, device=device) for _ in range(3))
    rates = torch.linspace(-6, -1, heads * width, device=device).view(heads, width)
    w = -torch.exp(rates + 0.5 * torch.randn(batch, tokens, heads, width, device=device))
    u = 0.5 * torch.randn(heads, width, device=device)
    return {"r": r.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "w": w, "u": u}


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator in the inputs' dtype, by halving chunks repeatedly."""
    return decayed_attention(x["r"], x["k"], x["v"], x["w"], x["u"], state, bounds)


@contextmanager
def selected(name: str) -> Iterator[Function]:
    """Yield the function of that name; in the context, our kernels run at every length."""
    if name in OURS:
        call = OPERATOR.named(name).call
        yield lambda x: call(*x.values(), None, None)[0]
    else:
        function = getattr(import_module("fla.ops.rwkv6"), name)
        yield lambda x: function(**x, scale=1.0, output_final_state=True)[0]


COMPARISON = Comparison(selected, exact, dict.fromkeys(WAYS, CHECKED_TOKENS), peak=True)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    mount()
    torch.manual_seed(0)
    versions = {"fla-core": metadata.version("fla-core")}
    run = start("wkv6", PROTOCOL, args.commit, versions=versions)
    with torch.no_grad():
        clocks.soak(2)
        for way in WAYS:
            for tokens in TOKENS:
                shape = Shape(1, tokens, HEADS, WIDTH)
                x = draw(shape)
                short = tokens <= RECURRENT_TOKENS
                able = [name for name in NAMES if short or name not in ("cuda", RECURRENT)]
                of = {"way": way, **shape._asdict()}
                run = run.adding(*COMPARISON.entries(of, way, x, torch.randn_like(x["v"]), able))
                del x
                clocks.free()
                yield run


def limits(run: Run) -> Iterator[Criterion]:
    for row in run.rows("calls"):
        way, shape = row.of["way"], shape_of(row.of)
        text, triton = f"{way}, {shape}", row.by.get("triton")
        for kind, least in (("graph", LEAD if shape == LEAD_AT else 1), ("eager", 1)):
            lead = row.ratio(f"{kind}_ms", CHUNK, "triton")
            if lead is not None:
                yield Criterion(f"{text}, times chunk_rwkv6, {kind}", lead, least, True)
        if triton is not None and triton.failure:
            yield Criterion(f"{text}, timed", False, True, True)
        elif triton is not None:
            limit = OUTPUT_ERROR if way == "forward" else GRADIENT_ERROR
            for tensor, error in triton.errors.items():
                yield Criterion(f"{text}, error of {tensor}", error, limit)
