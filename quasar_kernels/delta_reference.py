"""The definition of the delta rule, with or without decays, in plain torch, in float64 by default.

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T     o_t = scale S_t^T q_t

g_t is a number for each head, or one for each channel of the keys. Sources: DeltaNet, arXiv
2406.06484; Gated DeltaNet, arXiv 2412.06464; Kimi Delta Attention, arXiv 2510.26692. Every function
is differentiable by autograd and runs on any device. This module is the specification of
`delta_rule` and shares no code with the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from quasar_kernels.decay_reference import run_recurrence

GROUP = 32
"""Number of chunks that are prepared at once, so that a GPU runs few and large operations."""


def delta_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token.

    Args:
        q, k: `[B, T, H, K]`, any floating dtype.
        v: `[B, T, H, V]`.
        beta: `[B, T, H]`, the step sizes.
        g: `[B, T, H]` or `[B, T, H, K]`, log decays, or None for none.
        initial_state: `[N, H, K, V]` or None for zeros; N is B, or the number of packed sequences.
        cu_seqlens: `[N + 1]` integers, bounds of the sequences packed along T (B = 1); a sequence
            may be empty. None for one sequence per batch row.
        scale: factor of the output.
        dtype: the arithmetic's and the results' dtype.

    Returns:
        o `[B, T, H, V]` and the final state `[N, H, K, V]`.
    """
    q, k, v, beta, g = _converted(q, k, v, beta, g, scale, dtype)

    def step(t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        key, value = k[:, t, :, :, None], v[:, t, :, None, :]  # [B, H, K, 1], [B, H, 1, V]
        state = torch.exp(g[:, t])[..., None] * state
        size = beta[:, t][..., None, None]
        state = state + size * key * (value - (key * state).sum(-2, keepdim=True))
        return (q[:, t, :, :, None] * state).sum(-2), state

    return run_recurrence(step, k.shape, v.shape[-1], initial_state, cu_seqlens, q)


def delta_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float = 1.0,
    chunk: int = 64,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute the same as `delta_recurrence` by chunks of `chunk` tokens, for long sequences.

    Decays per channel take `chunk` times the memory of k.
    """
    tensors = _converted(q, k, v, beta, g, scale, dtype)
    B, T, H, K = k.shape
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    N = B if cu_seqlens is None else len(bounds) - 1
    state = v.new_zeros(N, H, K, v.shape[-1], dtype=dtype)
    if initial_state is not None:
        state = initial_state.to(dtype)
    outputs, finals = [tensors[2][:, :0]], [state[:0]]
    for n, (start, stop) in enumerate(pairwise(bounds)):
        current = state if cu_seqlens is None else state[n : n + 1]
        size = max(1, min(chunk, stop - start))
        for t in range(start, stop, GROUP * size):
            part = [x[:, t : min(t + GROUP * size, stop)] for x in tensors]
            o, current = _process_group(part, current, size)
            outputs.append(o)
        finals.append(current)
    return torch.cat(outputs, dim=1), torch.cat(finals)


def _converted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    g = torch.zeros_like(beta) if g is None else g.to(dtype)
    return scale * q, k, v, beta, g if g.ndim == 4 else g[..., None]


def _process_group(part: Sequence[Tensor], state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Process several chunks; compute what is independent of the state for all of them at once.

    `part` is q, k, v, beta and g. Padding tokens have step size 0 and log decay 0, so they do not
    change the state.
    """
    q, k, v, beta, g = part
    Q, K, V, step, log = (_in_chunks(x, chunk) for x in (q, k, v, beta[..., None], g))
    since = log.cumsum(-2)  # [B, H, n, C, 1 or K]
    last = since[..., -1:, :]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).tril()[..., None]
    between = torch.where(causal, since.unsqueeze(-2) - since.unsqueeze(-3), 0).exp()
    if g.shape[-1] == 1:
        KK, QK = (x @ K.mT * between[..., 0] for x in (K, Q))
    else:
        KK, QK = (torch.einsum("...ik,...jk,...ijk->...ij", x, K, between) for x in (K, Q))
    M = (step * KK).tril(-1)
    L = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device) + M
    both = step * torch.cat((torch.exp(since) * K, V), dim=-1)
    solved = torch.linalg.solve_triangular(L, both, upper=False, unitriangular=True)
    reads, values = solved.split((K.shape[-1], V.shape[-1]), dim=-1)
    writes, kept = (torch.exp(last - since) * K).mT, torch.exp(last).mT
    entering, fresh = [], []
    for i in range(K.shape[2]):
        entering.append(state)
        fresh.append(values[:, :, i] - reads[:, :, i] @ state)
        state = kept[:, :, i] * state + writes[:, :, i] @ fresh[-1]
    before, updates = torch.stack(entering, dim=2), torch.stack(fresh, dim=2)
    o = (torch.exp(since) * Q) @ before + QK.tril() @ updates
    return o.flatten(2, 3).transpose(1, 2)[:, : q.shape[1]], state


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Return `[B, T, H, D]` as `[B, H, n, chunk, D]`, padded with zeros at the end."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.reshape(*x.shape[:2], x.shape[2] // chunk, chunk, x.shape[3])
