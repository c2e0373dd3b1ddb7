"""Inputs of the blocks' operators, and their gradients beside the definition's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quasar_kernels.reference import relative_rms


def wkv6_inputs(T, B=1, H=2, K=16, V=24, *, dtype=torch.float32, decay=0.1):
    """r, k, v, w, u as time mixing makes them; `decay` is about what a channel forgets a token."""
    r, k = (torch.randn(B, T, H, K).to(dtype) for _ in range(2))
    v = torch.randn(B, T, H, V).to(dtype)
    w = -decay * F.softplus(torch.randn(B, T, H, K)).to(torch.promote_types(dtype, torch.float32))
    return r, k, v, w, torch.randn(H, K)


def ssd_inputs(T, B=1, H=4, P=24, G=2, N=16, *, dtype=torch.float32, rate=1.0):
    """x, dt, A, B, C, D as a Mamba-2 layer makes them."""
    x, b, c = (torch.randn(B, T, *shape).to(dtype) for shape in ((H, P), (G, N), (G, N)))
    dt = F.softplus(torch.randn(B, T, H) - 2)
    return x, dt, -rate * torch.rand(H), b, c, torch.randn(H)


def results_and_gradients(run, tensors, dtype=None):
    """Results of `run(*tensors)`, an output and a state, and the gradients of a sum of both."""
    leaves = [x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in tensors]
    results = run(*leaves)
    torch.manual_seed(1)
    torch.autograd.backward(results, [torch.randn(x.shape).to(x) for x in results])
    return [*results, *(x.grad for x in leaves)]


def check(found, wanted, limit):
    """Every tensor has the definition's values within a relative RMS error."""
    for x, y in zip(found, wanted, strict=True):
        assert relative_rms(x, y) <= limit
