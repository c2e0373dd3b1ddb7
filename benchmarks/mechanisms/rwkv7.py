"""RWKV-7."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from benchmarks.engine.comparison import Inputs, Shape
from benchmarks.engine.mechanism import FLA, Implementation, functions, noise, recurrence

BOUND = -0.6065306597126334
"""-exp(-1/2): RWKV-7's log decays are sigmoids times this (arXiv 2503.14456)."""


def draw(shape: Shape, device: str) -> Inputs:
    """Draw r, k, v, a and b in bf16, and the log decays w in fp32."""
    r, k, v = (noise(shape, device).bfloat16() for _ in range(3))
    w = BOUND * noise(shape, device).sigmoid()
    removed = F.normalize(noise(shape, device), dim=-1)
    added = removed * noise(shape, device).sigmoid()
    return {"r": r, "w": w, "k": k, "v": v, "a": -removed.bfloat16(), "b": added.bfloat16()}


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token."""
    return recurrence(x["r"], x["k"], x["v"], x["w"], x["a"], x["b"], state, bounds)


FUNCTIONS = functions(draw, exact, "rwkv7", chunk_options={"lower_bound": BOUND}, scale=1.0)
IMPLEMENTATIONS = {"rwkv7": Implementation("RWKV-7", FLA, FUNCTIONS)}
