"""Mamba-2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engine.comparison import Inputs, Shape
from benchmarks.engine.mechanism import (
    FLA,
    HEADS,
    OURS,
    Bounds,
    Calls,
    Implementation,
    calls,
    imported,
    noise,
    steps,
)
from quasar_kernels.blocks.chunked import decayed_attention

STATE = 64
"""State size: the default of quasar_kernels.blocks.Mamba2."""
NAME = "Mamba-2"


def draw(shape: Shape, device: str) -> Inputs:
    """Draw x, B and C in bf16, step sizes dt `[B, T, H]` and rates A `[H]` in fp32."""
    x = F.silu(noise(shape, device))
    B, C = (F.silu(noise(shape._replace(heads=1, width=STATE), device)) for _ in range(2))
    bias = steps(shape.heads, device).expm1().log()
    dt = F.softplus(torch.randn(shape[:3], device=device) + bias)
    A = -torch.empty(shape.heads, device=device).uniform_(1, 16)
    return {"x": x.bfloat16(), "dt": dt, "A": A, "B": B.bfloat16(), "C": C.bfloat16()}


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator in the inputs' precision by the blocks' PyTorch implementation."""
    heads = x["x"].shape[2]
    q, k = (x[name].repeat_interleave(heads, 2) for name in ("C", "B"))
    v = x["dt"][..., None] * x["x"]
    return decayed_attention(q, k, v, (x["dt"] * x["A"])[..., None], None, state, bounds)


def make(kernels: str, device: str) -> Calls:
    """Return the calls of quasar_kernels' operator with one of its kernels."""
    from quasar_kernels.blocks.ssd import OPERATOR, ssd

    function: Callable[..., tuple[Tensor, Tensor]]
    function = ssd if device == "cpu" else OPERATOR.named(kernels).call

    def call(x: Inputs, state: Tensor | None, bounds: Bounds | None) -> Tensor:
        where = bounds and (bounds.host if kernels == "triton" else bounds.here)
        tensors: list[Any] = [*(x[n] for n in ("x", "dt", "A", "B", "C")), None, state, where]
        return function(*tensors)[0]

    return calls(
        draw,
        exact,
        device,
        chunks=lambda x, bounds: call(x, None, bounds),
        step=_simple_gla if kernels == "fla-core" else lambda x, state: call(x, state, None),
        like="x",
    )


def _simple_gla(x: Inputs, state: Tensor) -> Tensor:
    (function,) = imported("fla.ops.simple_gla", "fused_recurrent_simple_gla")
    q, k = (x[n].expand(-1, -1, HEADS, -1).contiguous() for n in ("C", "B"))
    v, g = (x["x"] * x["dt"][..., None]).to(x["x"].dtype), x["dt"] * x["A"]
    o: Tensor = function(q, k, v, g=g, scale=1.0, initial_state=state, output_final_state=True)[0]
    return o


IMPLEMENTATIONS = {
    "mamba2": Implementation(NAME, OURS, partial(make, "triton")),
    "mamba2-fla": Implementation(NAME, FLA, partial(make, "fla-core")),
}
