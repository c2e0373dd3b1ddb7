"""The blocks' operators with their definitions and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quasar_kernels.blocks.ssd import ssd
from quasar_kernels.blocks.wkv6 import wkv6
from quasar_kernels.decay_reference import ssd_recurrence, wkv6_recurrence


def wkv6_inputs(T, B=1, H=2, K=16, V=24, *, dtype=torch.float32, decay=0.1):
    """r, k, v, w, u as time mixing makes them; `decay` is about what a channel forgets a token."""
    r, k = (torch.randn(B, T, H, K).to(dtype) for _ in range(2))
    v = torch.randn(B, T, H, V).to(dtype)
    w = -decay * F.softplus(torch.randn(B, T, H, K)).to(torch.promote_types(dtype, torch.float32))
    return r, k, v, w, torch.randn(H, K)


def ssd_inputs(T, B=1, H=4, P=24, G=2, N=16, *, dtype=torch.float32, decay=1.0):
    """x, dt, A, B, C, D as a Mamba-2 layer makes them; `decay` is the largest of the rates A."""
    x, b, c = (torch.randn(B, T, *shape).to(dtype) for shape in ((H, P), (G, N), (G, N)))
    dt = F.softplus(torch.randn(B, T, H) - 2)
    return x, dt, -decay * torch.rand(H), b, c, torch.randn(H)


class Operator(NamedTuple):
    """An operator, its definition, and what is drawn for it."""

    call: Callable[..., Any]  # of the inputs, a state and bounds
    exact: Callable[..., Any]
    inputs: Callable[..., tuple[torch.Tensor, ...]]
    state: tuple[int, ...]  # of one sequence of these inputs
    steady: int  # results and gradients, from the first on, that no decay cancels


WKV6 = Operator(wkv6, wkv6_recurrence, wkv6_inputs, (2, 16, 24), 5)
SSD = Operator(ssd, ssd_recurrence, ssd_inputs, (4, 16, 24), 4)
