"""The layer's forward pass on a GPU without cached states, and the results its backward pass needs.

q, k, v = silu(causal_conv(x W))        o = operator(q, k, v, softplus(beta_log))
y = (rmsnorm(o per head) * sigmoid(x W_g0 W_g1 + b)) W_o
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fla.ops.quasar.chunk import MAX_HEAD_DIM, recorded_forward
from fla.ops.quasar.layer.hopper.attend import (
    LayerResults,
    OutputInputs,
    attend_fused,
    begin_fused,
    finish_fused,
    fused_program,
)
from fla.ops.quasar.layer.gate_and_norm import gate_and_norm
from fla.ops.quasar.layer.kernels import CONV_TAPS, causal_conv_silu, gated_rmsnorm
from fla.ops.quasar.layer.products import packed, unrounded
from fla.ops.quasar.layer.weights import Weights
from fla.ops.quasar.switches import Backend

MANY_TOKENS = 1 << 15
"""From so many tokens on the library's product before the convolution is rounded."""

APART = 1 << 13
"""From so many tokens on the last kernel is launched behind a graph: copying y would cost more."""


class Call(NamedTuple):
    """A call's settings: all that the result depends on besides input and weights."""

    heads: int
    head_dim: int
    eps: float  # of the norm
    dtype: torch.dtype  # of the products
    cu_seqlens: torch.Tensor | None  # [N + 1] bounds of sequences packed in one row
    backend: Backend  # QUASAR_BACKEND's value

    def takes(self, x: torch.Tensor, weights: Weights) -> bool:
        """Return whether the kernels serve a call with these weights."""
        taps = weights.q_taps
        return (
            x.is_cuda
            and self.dtype != torch.float64
            and self.head_dim <= MAX_HEAD_DIM
            and taps is not None
            and taps.shape[-1] == CONV_TAPS
            and self.backend != "torch"
        )

    def copied_as(self, x: torch.Tensor, weights: Weights) -> torch.dtype:
        """Return the dtype in which a copy of x gives the bits that x does, with fewest bytes."""
        fused = self.cu_seqlens is None and fused_program(x, weights, self.dtype, self.backend)
        return x.dtype if fused else self.dtype


def layer_forward(
    call: Call, x: torch.Tensor, weights: Weights, *, keep: bool = False, output: bool = True
) -> LayerResults:
    """Compute the layer; it records nothing for autograd.

    Args:
        x: `[B, T, hidden]`, for which `call.takes` it.
        weights: the layer's.
        keep: whether to return the intermediate results.
        output: whether to compute y. Without it there are no `products` either: a backward pass
            computes them once more, since the operator's results take their memory.
    """
    if call.cu_seqlens is None:
        results = attend_fused(
            x, weights, call.dtype, call.eps, call.backend, keep=keep, output=output
        )
        if results is not None:
            return results
    with torch.autocast(x.device.type, enabled=False):
        return _forward_by_library(call, x, weights, keep, output)


def begin(
    call: Call, x: torch.Tensor, weights: Weights
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Compute the layer as `layer_forward` does, except its last kernel if fused and long.

    Returns:
        The output and an empty tuple, or an empty list and the arguments of `finish`.
    """
    partial = None
    if call.cu_seqlens is None and x.shape[1] >= APART:
        partial = begin_fused(x, weights, call.dtype, call.backend)
    return ([], partial[0]) if partial else ([layer_forward(call, x, weights).y], ())


def finish(
    call: Call, x: torch.Tensor, weights: Weights, output_inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Return the layer's output from the second result of `begin` for the same call."""
    y = finish_fused(OutputInputs(*output_inputs), call.eps, call.backend)
    return layer_forward(call, x, weights).y if y is None else y


def _forward_by_library(
    call: Call, x: torch.Tensor, weights: Weights, keep: bool, output: bool
) -> LayerResults:
    B, T, D = x.shape
    H, S, dtype = call.heads, call.head_dim, call.dtype
    # one cast and one product for q, k, v and the gate's narrow half; plain matrices, so that a
    # bias is added inside its product
    projections, *gate_weights, out_weight = packed(weights.of_products(), dtype)
    rows = x.reshape(B * T, D).to(dtype)
    products = project(rows, projections)
    qkv, narrow = products.split([3 * H * S, S], dim=-1)
    # a copy, so that the products, gigabytes for a million tokens, can be freed
    narrow = narrow.to(dtype).contiguous()
    taps, bias = weights.joined_taps()
    position = positions(B, T, call.cu_seqlens, x.device)
    qkv = causal_conv_silu(qkv, taps, bias, position, dtype)
    results = LayerResults(None)
    if keep:
        results = LayerResults(None, rows, products if output else None, narrow)
    del rows, products
    q, k, v = qkv.view(B, T, 3, H, S).unbind(2)
    beta = F.softplus(weights.beta_log.float())
    operator = recorded_forward(q, k, v, beta, cu_seqlens=call.cu_seqlens, backend=call.backend)
    if keep:
        results = results._replace(operator=operator)
    o = operator.o
    del q, k, v, qkv, operator
    if not output:
        return results
    o = gated(o, narrow, gate_weights, weights.norm, call.eps)
    return results._replace(y=F.linear(o.view(B * T, H * S), out_weight).view(B, T, D))


def project(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows weight^T, in fp32 where the rows are few and in bf16.

    Rounding q, k and v to bf16 before their convolution is a quarter of the layer's whole error.
    Below `MANY_TOKENS` keeping them in fp32 costs little.
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
    """Return o `[B, T, H, S]`, normed and gated; in one kernel where nothing is recorded."""
    S = o.shape[-1]
    one_kernel = o.is_cuda and o.dtype in (torch.bfloat16, torch.float16)
    if one_kernel and S <= MAX_HEAD_DIM and not torch.is_grad_enabled():
        return gate_and_norm(o.flatten(0, 1), narrow, *gate_weights, norm_weight, eps)
    gate = F.linear(narrow, *gate_weights)
    return gated_rmsnorm(o.reshape(-1, S), gate.view(-1, S), norm_weight, eps)


def positions(
    B: int, T: int, cu_seqlens: torch.Tensor | None, device: torch.device
) -> torch.Tensor | int | None:
    """Return the tokens' positions in their sequences, in the form of `causal_conv_silu`.

    That is each token's place `[T]`, int32, for packed sequences; T for several rows; else None.
    """
    if cu_seqlens is None:
        return None if B == 1 else T
    token, first = torch.arange(T, device=device), cu_seqlens.to(device, torch.int64)
    return (token - first[torch.searchsorted(first, token, right=True) - 1]).int()


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
