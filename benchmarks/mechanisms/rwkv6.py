"""RWKV-6."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.engine.comparison import Inputs, Shape
from benchmarks.engine.mechanism import (
    FLA,
    OURS,
    Calls,
    Implementation,
    calls,
    functions,
    noise,
)
from quasar_kernels.blocks.chunked import decayed_attention


def draw(shape: Shape, device: str) -> Inputs:
    """Draw r, k and v in bf16, log decays w and the bonus u `[H, S]` in fp32.

    A new RWKV-6 layer spreads its channels' log rates from -6 to -1 (arXiv 2404.05892). Each token
    adds noise of half a unit.
    """
    heads, width = shape.heads, shape.width
    r, k, v = (noise(shape, device).bfloat16() for _ in range(3))
    rates = torch.linspace(-6, -1, heads * width, device=device).view(heads, width)
    w = -torch.exp(rates + 0.5 * noise(shape, device))
    u = 0.5 * torch.randn(heads, width, device=device)
    return {"r": r, "k": k, "v": v, "w": w, "u": u}


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator in the inputs' dtype, by halving chunks repeatedly."""
    return decayed_attention(x["r"], x["k"], x["v"], x["w"], x["u"], state, bounds)


def make(device: str) -> Calls:
    from quasar_kernels.blocks.wkv6 import wkv6

    return calls(
        draw,
        exact,
        device,
        chunks=lambda x, bounds: wkv6(**x, cu_seqlens=bounds and bounds.host)[0],
        step=lambda x, state: wkv6(**x, initial_state=state)[0],
    )


IMPLEMENTATIONS = {
    "rwkv6": Implementation("RWKV-6", OURS, make),
    "rwkv6-fla": Implementation("RWKV-6", FLA, functions(draw, exact, "rwkv6", scale=1.0)),
}
