"""The layer's stages by library products and general kernels, for every supported call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fla.ops.quasar.backend import MAX_HEAD_DIM
from fla.ops.quasar.layer.call import Activations, Call, Stages, Weights
from fla.ops.quasar.layer.gate_and_norm import gate_and_norm
from fla.ops.quasar.layer.kernels import causal_conv_silu, gated_rmsnorm
from fla.ops.quasar.layer.products import concatenate_weights, unrounded
from fla.ops.quasar.scan import ScanInputs, StepSizes

MANY_TOKENS = 1 << 15
"""Least tokens with which bf16 products are rounded before the convolution."""


def _project(
    call: Call, x: torch.Tensor, weights: Weights, keep: bool, output: bool
) -> Activations:
    B, T, D = x.shape
    H, S, dtype = call.heads, call.head_dim, call.dtype
    # one cast and one product for q, k, v and the gate's narrow half
    projections, *others = concatenate_weights(weights, dtype)
    rows = x.reshape(B * T, D).to(dtype)
    products = project(rows, projections)
    qkv, narrow = products.split([3 * H * S, S], dim=-1)
    # a copy, so that the products, gigabytes for a million tokens, can be freed
    narrow = narrow.to(dtype).contiguous()
    taps, bias = weights.joined_taps()
    position = positions(B, T, call.cu_seqlens, x.device)
    qkv = causal_conv_silu(qkv, taps, bias, position, dtype)
    kept = products if keep and output else None
    del products
    return activations(call, weights, others, qkv, narrow, rows if keep else None, kept, B)


def activations(
    call: Call,
    weights: Weights,
    others: Sequence[torch.Tensor],
    qkv: torch.Tensor,
    narrow: torch.Tensor,
    rows: torch.Tensor | None,
    products: torch.Tensor | None,
    batch: int,
) -> Activations:
    """Return the inputs of the operator and of this module's output stage.

    Args:
        others: the matrices that `concatenate_weights` returns after the first.
        qkv: q, k and v, `[R, 3 H S]`.
        narrow, rows, products: those of `Activations`.
        batch: sequences of equal length in qkv, or 1.
    """
    q, k, v = qkv.view(batch, -1, 3, call.heads, call.head_dim).unbind(2)
    beta = F.softplus(weights.beta_log.float())
    scan = ScanInputs(q, k, v, StepSizes(beta, False), cu_seqlens=call.cu_seqlens)
    *gate_weights, out_weight = others
    output_weights = (*gate_weights, weights.norm, out_weight)
    return Activations(scan, narrow, output_weights, rows, products)


def _output(call: Call, tensors: Activations) -> torch.Tensor:
    *gate_weights, norm_weight, out_weight = tensors.output_weights
    o = gated(tensors.o, tensors.narrow, gate_weights, norm_weight, call.eps)
    tensors.o = None
    return F.linear(o.view(-1, call.heads * call.head_dim), out_weight)


LIBRARY = Stages(_project, _output)


def project(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows weight^T, in fp32 (`unrounded`) for fewer than `MANY_TOKENS` rows in bf16.

    Rounding q, k and v to bf16 before their convolution causes a quarter of the layer's error, and
    for few tokens fp32 costs little time.
    """
    if rows.shape[0] < MANY_TOKENS and rows.dtype == torch.bfloat16:
        return unrounded(rows, weight)
    return F.linear(rows, weight)


def gated(
    o: torch.Tensor,
    narrow: torch.Tensor,
    gate_weights: Sequence[torch.Tensor],
    norm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return the gated norm of o `[..., H, S]`, with the gate in the same kernel if possible."""
    S = o.shape[-1]
    one_kernel = o.is_cuda and o.dtype in (torch.bfloat16, torch.float16)
    if one_kernel and S <= MAX_HEAD_DIM and not torch.is_grad_enabled():
        return gate_and_norm(o.flatten(0, -3), narrow, *gate_weights, norm_weight, eps)
    gate = F.linear(narrow, *gate_weights)
    return gated_rmsnorm(o.reshape(-1, S), gate.view(-1, S), norm_weight, eps)


def positions(
    B: int, T: int, cu_seqlens: torch.Tensor | None, device: torch.device
) -> torch.Tensor | int | None:
    """Return the tokens' positions in their sequences, as `causal_conv_silu` needs them.

    They are `[T]` int32 for packed sequences, the length T for a batch of B > 1, otherwise None.
    """
    if cu_seqlens is None:
        return None if B == 1 else T
    token, first = torch.arange(T, device=device), cu_seqlens.to(device, torch.int64)
    return (token - first[torch.searchsorted(first, token, right=True) - 1]).int()


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
