"""The definition of QuasarAttention in plain torch, float64 by default.

    lambda_t = |k_t|^2        alpha_t = (1 - exp(-beta lambda_t)) / (lambda_t + 1e-8)
    S_t = (I - alpha_t k_t k_t^T) S_{t-1} + alpha_t k_t v_t^T        o_t = S_t^T q_t

Source: Error-Free Linear Attention, arXiv 2512.12602. Every function is differentiable by autograd
and runs on any device. This is the specification of the kernels; nothing in it is shared with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-8
"""Added to |k|^2 in the step size; part of the definition."""


def step_size(lam: Tensor, beta: Tensor) -> Tensor:
    """Return alpha = (1 - exp(-beta lam)) / (lam + 1e-8), of the broadcast shape.

    Between 1e-8 and 1/beta, alpha is close to beta; below 1e-8 it falls to zero with lam, so a zero
    key leaves the state exactly as it was. Value and gradients are finite at lam = 0.

    Args:
        lam: |k|^2, not negative.
        beta: positive, broadcastable against `lam`.
    """
    return -torch.expm1(-beta * lam) / (lam + EPSILON)


def quasar_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Walk the recurrence token by token.

    Args:
        q, k, v: `[B, T, H, S]`, any floating dtype.
        beta: `[H]`, positive.
        initial_state: `[N, H, S, S]`, key dimension first, or None for zeros; N is B, or the number
            of packed sequences.
        cu_seqlens: `[N + 1]` integers, bounds of the sequences packed along T (B = 1); a sequence
            may be empty. None for one sequence a batch row.
        dtype: the arithmetic's and the results' dtype.

    Returns:
        o `[B, T, H, S]` and the final state `[N, H, S, S]`.
    """
    return _over_sequences(_walk_tokens, q, k, v, beta, initial_state, cu_seqlens, dtype)


def quasar_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    chunk: int = 64,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute the same as `quasar_recurrence` by chunks of `chunk` tokens, for long sequences.

    In float64 it agrees with the recurrence to about 1e-13. Beside the inputs and the output it
    holds one chunk at a time.
    """

    def walk(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return _walk_chunks(q, k, v, beta, state, chunk)

    return _over_sequences(walk, q, k, v, beta, initial_state, cu_seqlens, dtype)


def quasar_layer(
    state_dict: Mapping[str, Tensor],
    x: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    eps: float = 1e-5,
    dtype: torch.dtype = torch.float64,
    operator: Callable[..., tuple[Tensor, Tensor]] = quasar_chunked,
) -> Tensor:
    """Apply the whole QuasarAttention layer.

    Args:
        state_dict: the layer's weights by name; the convolutions may be absent.
        x: `[B, T, hidden_size]`.
        num_heads, head_dim: H and S; the projections are H * S wide.
        eps: epsilon of the RMS norm.
        dtype: the arithmetic's and the result's dtype.
        operator: `quasar_chunked` or `quasar_recurrence`.

    Returns:
        `[B, T, hidden_size]`.
    """
    w = {name: value.to(x.device, dtype) for name, value in state_dict.items()}
    x = x.to(dtype)

    def projected(name: str) -> Tensor:
        y = x @ w[f"{name}_proj.weight"].T
        if f"{name}_conv1d.weight" in w:
            taps = w[f"{name}_conv1d.weight"]
            padded = F.pad(y.transpose(1, 2), (taps.shape[-1] - 1, 0))
            bias = w.get(f"{name}_conv1d.bias")
            y = F.silu(F.conv1d(padded, taps, bias, groups=taps.shape[0])).mT.contiguous()
        return y.view(*y.shape[:2], num_heads, head_dim)

    q, k, v = projected("q"), projected("k"), projected("v")
    o, _ = operator(q, k, v, F.softplus(w["beta_log"]), dtype=dtype)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * w["o_norm.weight"]
    gate = (x @ w["g_proj.0.weight"].T) @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]
    return (o.flatten(-2) * torch.sigmoid(gate)) @ w["o_proj.weight"].T


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Return rms(actual - expected) / rms(expected), computed in float64.

    NaN anywhere gives NaN, which no bound accepts; an expected value of all zeros gives 0 for an
    exact match and infinity otherwise.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    if expected.numel() == 0:
        return 0.0
    wanted = expected.detach().double()
    error = float(torch.linalg.vector_norm(actual.detach().double() - wanted))
    size = float(torch.linalg.vector_norm(wanted))
    if size == 0:
        return 0.0 if error == 0 else error * float("inf")
    return error / size


Walk = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _over_sequences(
    walk: Walk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Apply `walk` to the batch rows together, or to each packed sequence in turn."""
    B, _, H, S = q.shape
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    if initial_state is None:
        state = q.new_zeros(N, H, S, S)
    else:
        state = initial_state.to(dtype)
    if cu_seqlens is None:
        return walk(q, k, v, beta, state)
    outputs, states = [q.new_zeros(1, 0, H, S)], [q.new_zeros(0, H, S, S)]
    for n, (start, stop) in enumerate(_bounds(cu_seqlens)):
        row = slice(start, stop)
        o, final = walk(q[:, row], k[:, row], v[:, row], beta, state[n : n + 1])
        outputs.append(o)
        states.append(final)
    return torch.cat(outputs, dim=1), torch.cat(states)


def _bounds(cu_seqlens: Tensor) -> Iterator[tuple[int, int]]:
    edges = [int(edge) for edge in cu_seqlens.tolist()]
    return pairwise(edges)


def _walk_tokens(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(q.shape[1]):
        key, value = k[:, t, :, :, None], v[:, t, :, None, :]  # [B, H, S, 1], [B, H, 1, S]
        alpha = step_size(k[:, t].square().sum(-1), beta)[..., None, None]
        state = state + alpha * key * (value - (key * state).sum(-2, keepdim=True))
        outputs.append((q[:, t, :, :, None] * state).sum(-2))
    return (torch.stack(outputs, dim=1) if outputs else torch.zeros_like(q)), state


def _walk_chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    outputs = [q[:, :0]]
    for t in range(0, q.shape[1], chunk):
        Q, K, V = (x[:, t : t + chunk].transpose(1, 2) for x in (q, k, v))  # [B, H, C, S]
        alpha = step_size(K.square().sum(-1), beta[:, None])[..., None]
        M = torch.tril(alpha * (K @ K.mT), diagonal=-1)
        L = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device) + M
        fresh = torch.linalg.solve_triangular(
            L, alpha * (V - K @ state), upper=False, unitriangular=True
        )
        outputs.append((Q @ state + torch.tril(Q @ K.mT) @ fresh).transpose(1, 2))
        state = state + K.mT @ fresh
    return torch.cat(outputs, dim=1), state
