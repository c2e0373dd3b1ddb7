"""Kimi Delta Attention: the delta rule with a decay for each channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.delta_rule import PLAIN
from benchmarks.cases.delta_rule import draw as draw_delta
from benchmarks.engine.comparison import Inputs, Shape
from benchmarks.engine.mechanism import FLA, Implementation, functions, noise, recurrence, steps


def draw(shape: Shape, device: str) -> Inputs:
    """Draw the delta rule's inputs, and log decays g in fp32."""
    x = draw_delta(PLAIN, shape, device)
    A = torch.empty(shape.heads, 1, device=device).uniform_(1, 16)
    bias = steps(shape.heads * shape.width, device).view(shape.heads, shape.width).expm1().log()
    g = -A * F.softplus(noise(shape, device) + bias)
    return {"q": x["q"], "k": x["k"], "v": x["v"], "g": g, "beta": x["beta"]}


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator token by token."""
    # a key reads the state after the decay, and its token subtracts a share of the value read
    write = x["beta"][..., None] * x["k"]
    read = -x["k"] * x["g"].exp()
    q = x["q"] * x["q"].shape[-1] ** -0.5
    return recurrence(q, write, x["v"], x["g"], read, write, state, bounds)


IMPLEMENTATIONS = {"kda": Implementation("KDA", FLA, functions(draw, exact, "kda"))}
