"""QuasarAttention's chunk form in torch, for fused_recurrent's gradients and calls without kernels.

A chunk of C tokens, with one row of Q, K and V per token and a = diag(step sizes), maps the state S
to S', for any widths of keys and values:

    M = strict_tril(a K K^T)    U = (I + M)^-1 a V    W = (I + M)^-1 a K
    V' = U - W S                O = Q S + tril(Q K^T) V'                S' = S + K^T V'

With log decays, each product of two tokens' rows is multiplied by exp of the sum of the log decays
between these tokens. This sum is never computed as the difference of two longer sums, because next
to strong decays the digits of weak ones would be lost. Decays per channel multiply the summands of
the product instead, one for each channel. V' and S' are computed chunk by chunk, everything else
for all chunks of a block at once. A long sequence has several blocks. Autograd then keeps only the
inputs and the states between blocks, and the backward pass computes the blocks again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fla.ops.quasar import torch_private
from fla.ops.quasar.gate import fused_quasar_gate
from fla.ops.quasar.operator_types import StepSizes
from fla.ops.quasar.segments import host_bounds

CHANNEL_CHUNK = 16
"""Maximum number of tokens of a chunk with decays per channel.

The decays between the tokens of a chunk take this many times the memory of k.
"""
BLOCK_ELEMENTS = 1 << 23
"""Elements of a tensor in a block: 16,384 tokens of 8 heads of 64, 32 MB of fp32."""


@torch.compiler.disable
def chunk_quasar_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    chunk_size: int = 64,
    g: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply QuasarAttention to whole sequences, on any device, differentiably.

    Arguments and results are those of `run_chunks`, with keys and values of any widths. The
    arithmetic is fp32 (fp64 for fp64 inputs), independent of autocast.

    Args:
        chunk_size: tokens of a chunk; changes the rounding only.

    Raises:
        ValueError: the bounds `cu_seqlens` do not fit one row of T tokens.
    """
    B, T, H, K = q.shape
    if g is not None:
        g = g if g.ndim == 4 else g.unsqueeze(-1)  # [B, T, H, K or 1]
        chunk_size = min(chunk_size, CHANNEL_CHUNK) if g.shape[-1] > 1 else chunk_size
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lengths = [T] if cu_seqlens is None else sequence_lengths(cu_seqlens, B, T)
    N = B if cu_seqlens is None else len(lengths)
    with torch.autocast(q.device.type, enabled=False):
        if initial_state is None:
            state = torch.zeros(N, H, K, v.shape[-1], dtype=dtype, device=q.device)
        else:
            state = initial_state.to(dtype)
        beta = beta.to(dtype)
        g = None if g is None else g.to(dtype)
        rows = split_tokens((q, k, v, beta, g), lengths)
        states = [state] if cu_seqlens is None else state.split(1)
        results = [
            _sequence(q, k, v, beta, g, entering, scale, chunk_size)
            for (q, k, v, beta, g), entering in zip(rows, states, strict=True)
        ]
        o = torch.cat([v[:, :0].to(q.dtype), *(o for o, _ in results)], dim=1)
        final = torch.cat([state[:0], *(s for _, s in results)])
    return o, final if output_final_state else None


def sequence_lengths(cu_seqlens: torch.Tensor, B: int, T: int) -> list[int]:
    """Return the lengths of packed sequences; raise ValueError for bounds that do not fit."""
    whole = isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.dtype in (torch.int32, torch.int64)
    if not whole or cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens must be an int32 or int64 tensor [N + 1]; got {cu_seqlens}")
    if B != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row, so B must be 1; got B = {B}")
    return list(_lengths(host_bounds(cu_seqlens), T))


@functools.lru_cache(64)  # the layers of a model share the bounds
def _lengths(bounds: tuple[int, ...], T: int) -> tuple[int, ...]:
    lengths = tuple(stop - start for start, stop in pairwise(bounds))
    if bounds[:1] != (0,) or bounds[-1:] != (T,) or min(lengths, default=-1) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to T = {T}; got {list(bounds)}")
    return lengths


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Return x with rows of unit length, rounded to x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def split_tokens(
    inputs: Sequence[torch.Tensor | None], tokens: int | list[int]
) -> Iterator[tuple[Any, ...]]:
    """Yield the inputs of consecutive runs of tokens; a beta `[H]` and None are not split."""
    first: Any = inputs[0]
    count = len(first.split(tokens, 1))
    parts = ([x] * count if x is None or x.ndim == 1 else x.split(tokens, 1) for x in inputs)
    return zip(*parts, strict=True)


def _sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None,
    state: torch.Tensor,
    scale: float,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Process sequences of equal length, one per batch row, in blocks."""
    B, T, H, K = q.shape
    widest = max(K, v.shape[-1], chunk_size * (1 if g is None else g.shape[-1]))
    block = max(1, BLOCK_ELEMENTS // max(1, B * H * widest * chunk_size)) * chunk_size
    if T <= block:
        return _block(q, k, v, beta, g, state, scale, chunk_size)
    outputs = []
    for parts in split_tokens((q, k, v, beta, g), block):
        arguments = (*parts, state, scale, chunk_size)
        if torch.is_grad_enabled():
            o, state = checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            o, state = _block(*arguments)
        outputs.append(o)
    return torch.cat(outputs, dim=1), state


def _block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None,
    state: torch.Tensor,
    scale: float,
    C: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and the state after the tokens; states are `[B, H, K, V]` in beta's dtype."""
    B, T, H, K = q.shape
    V = v.shape[-1]
    if B * T * H == 0:
        o = v * beta.unsqueeze(-1) * (q * k).sum(-1, keepdim=True)  # for gradients of all inputs
        return (o if g is None else o * g.sum(-1, keepdim=True)).to(q.dtype), state
    dtype, out_dtype, NT = beta.dtype, q.dtype, -(-T // C)

    def chunks(x: torch.Tensor) -> torch.Tensor:  # [B, T, H, D] -> [NT, B * H, C, D]
        # the padding's keys are zeros and do not change the state
        x = F.pad(x, (0, 0, 0, 0, 0, NT * C - T)) if T % C else x
        x = x.reshape(B, NT, C, H, x.shape[-1]).permute(1, 0, 3, 2, 4)
        return x.to(dtype).reshape(NT, B * H, C, -1)

    if StepSizes.of(beta).per_token:
        alpha = beta.unsqueeze(-1)
    else:
        alpha = fused_quasar_gate(k.to(dtype).square().sum(-1, keepdim=True), beta, dtype)
    alpha, q, k, v = chunks(alpha), chunks(q), chunks(k), chunks(v)
    k_before, q_before, k_after = k, q, k  # times the decays before or after each token, if any
    decays: Sequence[Any] = [1.0] * NT  # of whole chunks
    if g is None or g.shape[-1] == 1:
        products, scores = k @ k.mT, q @ k.mT
    if g is not None:
        own = chunks(g)
        later = torch.ones(C, C, dtype=torch.bool, device=g.device).tril(-1).unsqueeze(-1)
        # [.., C, C, K or 1]: decay from the column's token to the row's
        between = torch.exp(torch.where(later, own.unsqueeze(-2), 0).cumsum(-3))
        if g.shape[-1] == 1:
            products, scores = (x * between.squeeze(-1) for x in (products, scores))
        else:
            since = between * k.unsqueeze(-3)
            products, scores = ((since * x.unsqueeze(-2)).sum(-1) for x in (k, q))
        before, after = torch.exp(own.cumsum(-2)), between[..., -1, :, :]
        k_before, q_before, k_after = k * before, q * before, k * after
        decays = before[..., -1:, :].mT.unbind(0)
    # the solver reads only the part below the diagonal, and takes the diagonal as ones
    right = alpha * torch.cat([v, k_before], dim=-1)
    U, W = torch.linalg.solve_triangular(
        alpha * products, right, upper=False, unitriangular=True
    ).split([V, K], -1)
    S_n = state.reshape(B * H, K, V)
    entering, updates = [], []
    for k_n, U_n, W_n, decay_n in zip(
        k_after.unbind(0), U.unbind(0), W.unbind(0), decays, strict=True
    ):
        entering.append(S_n)
        updates.append(torch.baddbmm(U_n, W_n, S_n, alpha=-1))  # V'
        S_n = torch.baddbmm(S_n if g is None else decay_n * S_n, k_n.mT, updates[-1])
    fresh = torch.stack(updates)
    o = q_before @ torch.stack(entering)
    unknown = torch_private.transforms_active() or torch_private.fake_mode()
    if fresh.is_cuda or (not unknown and fresh.sum().isfinite()):
        o = o + torch.tril(scores) @ fresh
    else:  # in a product, zero times NaN or inf would reach earlier tokens
        is_finite = torch.isfinite(fresh)
        o = o + torch.tril(scores) @ torch.where(is_finite, fresh, 0)
        o = o + torch.where(is_finite, 0, fresh).cumsum(-2)
    o = (o * scale).view(NT, B, H, C, V).permute(1, 0, 3, 2, 4).reshape(B, NT * C, H, V)
    return o[:, :T].to(out_dtype), S_n.view(B, H, K, V)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
