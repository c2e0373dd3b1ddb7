"""Shared by the tests of the delta rule: calls of its functions, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quasar_kernels import delta_rule
from quasar_kernels.delta_reference import delta_recurrence


class Inputs(NamedTuple):
    """A call's tensors."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # of unit length
    v: Tensor  # [B, T, HV, V]
    beta: Tensor  # [B, T, HV] fp32
    g: Tensor  # log decays, the same; per channel [B, T, HV, K]


def inputs(
    T: int,
    B: int = 1,
    H: int = 2,
    K: int = 16,
    V: int | None = None,
    *,
    group: int = 1,
    dtype: torch.dtype = torch.float32,
    decay: float = 0.1,
    channels: bool = False,
    device: str = "cpu",
) -> Inputs:
    """Draw layer-like inputs; `decay` is about the share that a head forgets per token.

    With `channels`, each channel of the keys has its own decay.
    """
    HV = H * group
    q, k = (torch.randn(B, T, H, K, device=device) for _ in range(2))
    v = torch.randn(B, T, HV, K if V is None else V, device=device)
    beta, gate = (torch.randn(B, T, HV, device=device) for _ in range(2))
    if channels:
        gate = torch.randn(B, T, HV, K, device=device)
    return Inputs(
        F.silu(q).to(dtype),
        F.normalize(F.silu(k), dim=-1).to(dtype),
        v.to(dtype),
        beta.sigmoid(),
        -decay * F.softplus(gate),
    )


def chunk(x: Inputs, gated: bool, **options):
    """Call the function for whole sequences."""
    if gated:
        return delta_rule.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, **options)
    return delta_rule.chunk_delta_rule(x.q, x.k, x.v, x.beta, **options)


def recurrent(x: Inputs, gated: bool, **options):
    """Call the function for decoding."""
    if gated:
        return delta_rule.fused_recurrent_gated_delta_rule(
            x.q, x.k, x.v, x.g, beta=x.beta, **options
        )
    return delta_rule.fused_recurrent_delta_rule(x.q, x.k, x.v, x.beta, **options)


def chunk_kda(x: Inputs, **options):
    """Call the function with decays per channel for whole sequences."""
    return delta_rule.chunk_kda(x.q, x.k, x.v, x.g, x.beta, **options)


def recurrent_kda(x: Inputs, **options):
    """Call the function with decays per channel for decoding."""
    return delta_rule.fused_recurrent_kda(x.q, x.k, x.v, x.g, x.beta, **options)


def used(x: Inputs, gated: bool) -> Inputs:
    """Return the inputs, with decays of zero for the rule without decay."""
    return x if gated else x._replace(g=torch.zeros_like(x.g))


def wide(x: Inputs) -> Inputs:
    """Return the inputs in float64, with q and k repeated for all heads of v."""
    group = x.v.shape[2] // x.q.shape[2]
    q, k = (y.repeat_interleave(group, 2) for y in (x.q, x.k))
    return Inputs(*(y.double() for y in (q, k, *x[2:])))


class Rule(NamedTuple):
    """A function, the inputs for it, and its definition."""

    call: Callable[..., Any]  # takes inputs and options
    draw: Callable[..., Inputs]
    gated: bool = True

    def exact(self, x: Inputs, *arguments, **options) -> tuple[Tensor, Tensor]:
        """Compute a call with the default scale of heads of 16 in float64."""
        inputs = wide(used(x, self.gated))
        return delta_recurrence(*inputs, *arguments, **{"scale": 0.25} | options)


PLAIN = {
    "chunk": Rule(partial(chunk, gated=False), inputs, gated=False),
    "recurrent": Rule(partial(recurrent, gated=False), inputs, gated=False),
}
GATED = {
    "gated chunk": Rule(partial(chunk, gated=True), inputs),
    "gated recurrent": Rule(partial(recurrent, gated=True), inputs),
    "KDA chunk": Rule(chunk_kda, partial(inputs, channels=True)),
    "KDA recurrent": Rule(recurrent_kda, partial(inputs, channels=True)),
}
rules = pytest.mark.parametrize("rule", (PLAIN | GATED).values(), ids=PLAIN | GATED)
gated_rules = pytest.mark.parametrize("rule", GATED.values(), ids=GATED)
