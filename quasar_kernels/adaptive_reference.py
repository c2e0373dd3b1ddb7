"""The adaptive layer's formula in plain torch, token by token, as the definition for its tests.

Source: the public QuasarAttention layer of spring 2026 (step sizes per token, unit q and k).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quasar_kernels.delta_reference import delta_recurrence
from quasar_kernels.reference import gated_output, project


def operator_inputs_reference(
    q: Tensor, k: Tensor, logits: Tensor, A_log: Tensor, dt_bias: Tensor, rotation: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit q and k `[N, H, S]` and the step sizes `[N, H]`, differentiably.

    Args:
        q, k: `[N, H, S]`.
        logits: `[N, H]`.
        A_log: `[H]`.
        dt_bias: `[H S]`.
        rotation: cos and sin `[L, R]`, row t % L for token t, or None.
    """
    if rotation is not None:
        cos, sin = (table.to(q.dtype) for table in rotation)
        q, k = (torch.stack([_turn(x[t], cos, sin, t) for t in range(len(x))]) for x in (q, k))
    q, k = (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12) for x in (q, k))
    steps = torch.sigmoid(logits)[:, :, None] + dt_bias.view(q.shape[1:])
    decay = torch.exp(-torch.exp(A_log)[:, None] * F.softplus(steps))
    square = k.square().sum(-1).clamp(0.1, 10.0) + 1e-6
    return q, k, (1.0 - decay).mean(-1) / square


def _turn(x: Tensor, cos: Tensor, sin: Tensor, token: int) -> Tensor:
    """Return one token's heads `[H, S]` with their first channels rotated by halves."""
    cos, sin, half = cos[token % len(cos)], sin[token % len(sin)], cos.shape[1] // 2
    first, second, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    return torch.cat(
        [first * cos[:half] - second * sin[:half], second * cos[half:] + first * sin[half:], rest],
        dim=-1,
    )


def adaptive_layer_reference(
    weights: Mapping[str, Tensor],
    x: Tensor,
    head_dim: int,
    eps: float,
    rotation: Any = None,
    operator: Callable[..., tuple[Tensor, Tensor]] = delta_recurrence,
) -> Tensor:
    """Return the layer's output for sequences of equal length, from zero states.

    Args:
        weights: the layer's `state_dict`.
        x: `[B, T, hidden]`.
        head_dim: S.
        eps: epsilon of the output norm.
        rotation: cos and sin `[T, R]`, or None.
        operator: the delta rule; `delta_chunked` is faster for many tokens.
    """
    B, T, _ = x.shape
    q, k, v = (F.silu(project(weights, x, name)).reshape(B * T, -1, head_dim) for name in "qkv")
    H = q.shape[1]
    logits = (x @ weights["b_proj.weight"].T).reshape(B * T, H)
    q, k, step = operator_inputs_reference(
        q, k, logits, weights["A_log"], weights["dt_bias"], rotation
    )
    q, k, v = (t.view(B, T, H, head_dim) for t in (q, k, v))
    o, _ = operator(q, k, v, step.view(B, T, H), scale=head_dim**-0.5)
    return gated_output(weights, x, o, eps)
