"""Gated linear attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from benchmarks.engine.comparison import Inputs, Shape
from benchmarks.engine.mechanism import FLA, Calls, Implementation, calls, imported, noise, packed
from quasar_kernels.blocks.chunked import decayed_attention

GATE_NORMALIZER = 16
"""Log decays are log-sigmoids divided by this (arXiv 2312.06635)."""


def draw(shape: Shape, device: str) -> Inputs:
    """Draw q, k and v in bf16, and log decays g in fp32."""
    q, k, v = (noise(shape, device).bfloat16() for _ in range(3))
    return {"q": q, "k": k, "v": v, "g": F.logsigmoid(noise(shape, device)) / GATE_NORMALIZER}


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator in the inputs' dtype, by halving chunks repeatedly."""
    q = x["q"] * x["q"].shape[-1] ** -0.5
    return decayed_attention(q, x["k"], x["v"], x["g"], None, state, bounds)


def make(device: str) -> Calls:
    chunk_gla, fused_recurrent_gla = imported("fla.ops.gla", "chunk_gla", "fused_recurrent_gla")

    def step(x: Inputs, state: Tensor) -> Tensor:
        o: Tensor = fused_recurrent_gla(
            x["q"], x["k"], x["v"], gk=x["g"], initial_state=state, output_final_state=True
        )[0]
        return o

    return calls(
        draw, exact, device, chunks=lambda x, bounds: chunk_gla(**x, **packed(bounds))[0], step=step
    )


IMPLEMENTATIONS = {"gla": Implementation("GLA", FLA, make)}
