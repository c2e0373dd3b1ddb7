"""The definition of QuasarAttention in plain torch, float64 by default.

    lambda_t = |k_t|^2        alpha_t = (1 - exp(-beta lambda_t)) / (lambda_t + 1e-8)
    S_t = (I - alpha_t k_t k_t^T) S_{t-1} + alpha_t k_t v_t^T        o_t = S_t^T q_t

Source: Error-Free Linear Attention, arXiv 2512.12602. The recurrence is the delta rule of
delta_reference.py with this step size. All functions run on any device, and all but `relative_rms`
are differentiable. This module is the specification of the kernels and shares no code with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quasar_kernels.delta_reference import delta_chunked, delta_recurrence

EPSILON = 1e-8
"""Added to |k|^2 in the step size; part of the definition."""


def step_size(lam: Tensor, beta: Tensor) -> Tensor:
    """Return alpha = (1 - exp(-beta lam)) / (lam + 1e-8), of the broadcast shape.

    For 1e-8 << lam << 1/beta, alpha is close to beta; below 1e-8 it falls to zero with lam. A zero
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
    """Compute the recurrence token by token.

    Args:
        q, k, v: `[B, T, H, S]`, any floating dtype.
        beta: `[H]`, positive.
        initial_state: `[N, H, S, S]`, key dimension first, or None for zeros; N is B, or the number
            of packed sequences.
        cu_seqlens: `[N + 1]` integers, bounds of the sequences packed along T (B = 1); a sequence
            may be empty. None for one sequence per batch row.
        dtype: the arithmetic's and the results' dtype.

    Returns:
        o `[B, T, H, S]` and the final state `[N, H, S, S]`.
    """
    alpha = _step_sizes(k, beta, dtype)
    return delta_recurrence(
        q, k, v, alpha, initial_state=initial_state, cu_seqlens=cu_seqlens, dtype=dtype
    )


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

    In float64 it agrees with the recurrence to about 1e-13. In addition to inputs and output, it
    needs copies of the inputs in `dtype` and the memory of a few chunks.
    """
    alpha = _step_sizes(k, beta, dtype)
    return delta_chunked(
        q, k, v, alpha, initial_state=initial_state, cu_seqlens=cu_seqlens, chunk=chunk, dtype=dtype
    )


def _step_sizes(k: Tensor, beta: Tensor, dtype: torch.dtype) -> Tensor:
    """Return alpha `[B, T, H]` of the keys `[B, T, H, S]` and beta `[H]`."""
    return step_size(k.to(dtype).square().sum(-1), beta.to(dtype))


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

    def heads(name: str) -> Tensor:
        y = project(w, x, name)
        y = F.silu(y) if f"{name}_conv1d.weight" in w else y
        return y.view(*y.shape[:2], num_heads, head_dim)

    o, _ = operator(heads("q"), heads("k"), heads("v"), F.softplus(w["beta_log"]), dtype=dtype)
    return gated_output(w, x, o, eps)


def project(w: Mapping[str, Tensor], x: Tensor, name: str) -> Tensor:
    """Return the projection `name` (q, k or v) of x `[B, T, hidden]`, convolved if w has taps."""
    y = x @ w[f"{name}_proj.weight"].T
    taps = w.get(f"{name}_conv1d.weight")
    if taps is None:
        return y
    padded = F.pad(y.mT, (taps.shape[-1] - 1, 0))
    return F.conv1d(
        padded, taps, w.get(f"{name}_conv1d.bias"), groups=taps.shape[0]
    ).mT.contiguous()


def gated_output(w: Mapping[str, Tensor], x: Tensor, o: Tensor, eps: float) -> Tensor:
    """Return a layer's output from x `[B, T, hidden]` and the operator's o `[B, T, H, S]`."""
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * w["o_norm.weight"]
    gate = (x @ w["g_proj.0.weight"].T) @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]
    return (o.flatten(-2) * torch.sigmoid(gate)) @ w["o_proj.weight"].T


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Return rms(actual - expected) / rms(expected), computed in float64.

    If either tensor contains NaN, the result is NaN, which fails every comparison with a limit. If
    all expected values are zero, it is 0 for an exact match and infinity otherwise.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    if expected.numel() == 0:
        return 0.0
    reference = expected.detach().double()
    error = float(torch.linalg.vector_norm(actual.detach().double() - reference))
    size = float(torch.linalg.vector_norm(reference))
    if size == 0:
        return 0.0 if error == 0 else error * float("inf")
    return error / size
