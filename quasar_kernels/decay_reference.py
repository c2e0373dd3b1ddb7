"""The definitions of WKV6 and SSD, computed token by token in torch, in float64 by default.

    WKV6, of RWKV-6: o_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t
                     S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T
    SSD, of Mamba-2: S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T
                     y_t = S_t^T C_t + D x_t

Sources: RWKV-6, arXiv 2404.05892; Mamba-2, arXiv 2405.21060. Both are differentiable by autograd
and run on any device. They specify `blocks` and share no code with its implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

Step = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""Takes a token's index and the state, and returns the token's output and the next state."""


def wkv6_recurrence(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute WKV6 token by token, with the arguments of `blocks.wkv6.wkv6`.

    Args:
        dtype: the arithmetic's and the results' dtype.

    Returns:
        o `[B, T, H, V]` and the final state `[N, H, K, V]`.
    """
    r, k, v, w, u = (x.to(dtype) for x in (r, k, v, w, u))

    def step(t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        written = k[:, t, :, :, None] * v[:, t, :, None, :]
        o = (r[:, t, :, :, None] * (state + u[:, :, None] * written)).sum(-2)
        return o, torch.exp(w[:, t])[..., None] * state + written

    return run_recurrence(step, k.shape, v.shape[-1], initial_state, cu_seqlens, r)


def ssd_recurrence(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute SSD token by token, with the arguments of `blocks.ssd.ssd`.

    Args:
        dtype: the arithmetic's and the results' dtype.

    Returns:
        y `[batch, T, H, P]` and the final state `[sequences, H, N, P]`.
    """
    x, dt, A, B, C = (y.to(dtype) for y in (x, dt, A, B, C))
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))

    def step(t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        size = dt[:, t][..., None, None]
        written = size * B[:, t, :, :, None] * x[:, t, :, None, :]
        state = torch.exp(size * A[:, None, None]) * state + written
        return (C[:, t, :, :, None] * state).sum(-2), state

    y, final = run_recurrence(step, B.shape, x.shape[-1], initial_state, cu_seqlens, x)
    return (y if D is None else y + D.to(dtype)[:, None] * x), final


def run_recurrence(
    step: Step,
    shape: torch.Size,
    width: int,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Process the batch rows together, or the packed sequences one after the other.

    `shape` is that of the keys, `width` that of the values; `like` has the state's dtype.
    """
    batch, T, H, K = shape
    bounds = [0, T] if cu_seqlens is None else [int(edge) for edge in cu_seqlens.tolist()]
    N = batch if cu_seqlens is None else len(bounds) - 1
    state = like.new_zeros(N, H, K, width)
    if initial_state is not None:
        state = initial_state.to(like.dtype)
    outputs, finals = [], []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        current = state if cu_seqlens is None else state[n : n + 1]
        for t in range(start, stop):
            o, current = step(t, current)
            outputs.append(o)
        finals.append(current)
    o = torch.stack(outputs, 1) if outputs else like.new_zeros(batch, 0, H, width)
    return o, torch.cat(finals) if finals else state
