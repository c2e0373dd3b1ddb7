"""Linear attention with decays by chunks, in torch: for CPUs, and for calls without kernels.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T

A chunk is halved repeatedly. One product gives the scores between the two halves. Its factors are
the first half's keys, scaled by the decays up to the middle, and the second half's queries, scaled
by the decays from the middle on. Only sums of log decays of the tokens in between are
exponentiated, never a difference of larger sums. Therefore no decay, not even one to zero, can
overflow or reduce the precision of neighbouring tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fla.ops.quasar.chunk_torch import sequence_lengths
from torch import Tensor

CHUNK = 64
"""Maximum number of tokens of a chunk, a power of two; it affects only the rounding."""


def decayed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    u: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply linear attention with decays to whole sequences, differentiably, in fp32 or fp64.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        g: `[B, T, H, K]`, or `[B, T, H, 1]` for all channels: log decays, not positive.
        u: `[H, K]`, factors of a token's own key and value, which it reads with the state before
            its decay. None: it reads the state after its decay and its own write.
        initial_state: `[N, H, K, V]`, N = B or the number of packed sequences; None is zero.
        cu_seqlens: `[N + 1]` bounds of sequences packed in one row (B = 1).

    Returns:
        o `[B, T, H, V]` in v's dtype, and the final state `[N, H, K, V]` in fp32 (fp64 for fp64 v).

    Raises:
        ValueError: the bounds `cu_seqlens` do not fit one row of T tokens.
    """
    B, T, H, K = q.shape
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    lengths = [T] if cu_seqlens is None else sequence_lengths(cu_seqlens, B, T)
    N = B if cu_seqlens is None else len(lengths)
    with torch.autocast(q.device.type, enabled=False):
        state = q.new_zeros(N, H, K, v.shape[-1], dtype=dtype)
        if initial_state is not None:
            state = initial_state.to(dtype)
        bonus = None if u is None else u.to(dtype)
        rows = (x.to(dtype).split(lengths, 1) for x in (q, k, v, g))
        states = [state] if cu_seqlens is None else state.split(1)
        results = [
            _sequence(q_n, k_n, v_n, g_n, bonus, entering)
            for q_n, k_n, v_n, g_n, entering in zip(*rows, states, strict=True)
        ]
    o = torch.cat([v[:, :0], *(o.to(v.dtype) for o, _ in results)], dim=1)
    return o, torch.cat([state[:0], *(final for _, final in results)])


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    if B * T * H == 0:
        product = q * k * g if u is None else q * k * g * u
        return v * product.sum(-1, keepdim=True), state  # for gradients of all inputs
    C = min(CHUNK, 1 << (T - 1).bit_length())
    NT = -(-T // C)

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, D] -> [NT, B, H, C, D]; padding has no effect
        x = F.pad(x, (0, 0, 0, 0, 0, NT * C - T))
        return x.reshape(B, NT, C, H, -1).permute(1, 0, 3, 2, 4)

    q, k, v, g = chunks(q), chunks(k), chunks(v), chunks(g)
    itself = (q * k if u is None else q * u[:, None] * k).sum(-1, keepdim=True)
    o = itself * v
    half = 1
    while half < C:
        o = o + _across_middles(q, k, v, g, u is None, half)
        half *= 2
    read = q * torch.exp(_until(g, u is None))
    written = (k * torch.exp(_after(g))).mT @ v
    kept = torch.exp(g.sum(-2)).unsqueeze(-1)
    entering = []
    for added, factor in zip(written.unbind(0), kept.unbind(0), strict=True):
        entering.append(state)
        state = factor * state + added
    o = o + read @ torch.stack(entering)
    return o.permute(1, 0, 3, 2, 4).reshape(B, NT * C, H, -1)[:, :T], state


def _across_middles(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, inclusive: bool, half: int
) -> Tensor:
    """Return the part `[..., C, V]` of the outputs of second halves that is due to first halves."""
    q, k, v, g = (x.unflatten(-2, (-1, 2, half)) for x in (q, k, v, g))
    reading = q[..., 1, :, :] * torch.exp(_until(g[..., 1, :, :], inclusive))
    writing = k[..., 0, :, :] * torch.exp(_after(g[..., 0, :, :]))
    read = (reading @ writing.mT) @ v[..., 0, :, :]
    return torch.stack([torch.zeros_like(read), read], dim=-3).flatten(-4, -2)


def _until(g: Tensor, inclusive: bool) -> Tensor:
    """Return for each row the sum of the log decays before it, and of its own if `inclusive`."""
    return (g if inclusive else F.pad(g, (0, 0, 1, -1))).cumsum(-2)


def _after(g: Tensor) -> Tensor:
    """Return for each row the sum of the log decays after it."""
    return F.pad(g, (0, 0, -1, 1)).flip(-2).cumsum(-2).flip(-2)
