"""WKV6 and SSD with their definitions and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quasar_kernels.blocks.ssd import ssd
from quasar_kernels.blocks.wkv6 import wkv6
from quasar_kernels.decay_reference import ssd_recurrence, wkv6_recurrence
from quasar_kernels.reference import relative_rms


def wkv6_inputs(T, B=1, H=2, K=16, V=24, *, dtype=torch.float32, decay=0.1):
    """Return r, k, v, w and u; `decay` is about the share that a channel forgets per token."""
    r, k = (torch.randn(B, T, H, K).to(dtype) for _ in range(2))
    v = torch.randn(B, T, H, V).to(dtype)
    w = -decay * F.softplus(torch.randn(B, T, H, K)).to(torch.promote_types(dtype, torch.float32))
    return r, k, v, w, torch.randn(H, K)


def ssd_inputs(T, B=1, H=4, P=24, G=2, N=16, *, dtype=torch.float32, decay=1.0):
    """Return x, dt, A, B, C and D as of a Mamba-2 layer; `decay` is the largest rate A."""
    x, b, c = (torch.randn(B, T, *shape).to(dtype) for shape in ((H, P), (G, N), (G, N)))
    dt = F.softplus(torch.randn(B, T, H) - 2)
    return x, dt, -decay * torch.rand(H), b, c, torch.randn(H)


class Operator(NamedTuple):
    """An operator, its definition, and its inputs."""

    call: Callable[..., Any]  # takes the inputs, a state and cu_seqlens
    exact: Callable[..., Any]  # the definition, with the same arguments
    inputs: Callable[..., tuple[torch.Tensor, ...]]  # draws inputs
    state: tuple[int, ...]  # shape of the state of one sequence of these inputs
    steady: int  # number of leading results and gradients that stay accurate at strong decays


WKV6 = Operator(wkv6, wkv6_recurrence, wkv6_inputs, (2, 16, 24), 5)
SSD = Operator(ssd, ssd_recurrence, ssd_inputs, (4, 16, 24), 4)


def check_fp16_range(operator, *sizes):
    """Check calls with results beyond fp16's range: infinities there, all other results right."""
    x = [30 * y if y.ndim > 2 and y.dtype == torch.float16 else y for y in operator.inputs(*sizes)]
    (o, state), (exact, last) = operator.call(*x), operator.exact(*x)
    share = exact / torch.finfo(torch.float16).max
    is_large, is_small = share.abs() > 1.01, share.abs() < 0.99
    assert is_large.any()
    assert is_small.any()
    assert torch.equal(o[is_large].double(), share[is_large].sign() * torch.inf)
    assert relative_rms(o[is_small], exact[is_small]) <= 1e-2
    assert relative_rms(state, last) <= 1e-2
