"""The layer by library products and general kernels, for every call.

`project` and `output` are the stages around the operator for calls that paths.py gives to kernels.
`layer_with_states` computes the whole layer on any device, also from cached states and on a rank;
autograd can record it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fla.ops.quasar import torch_private
from fla.ops.quasar.backend import MAX_HEAD_DIM
from fla.ops.quasar.chunk import chunk_quasar
from fla.ops.quasar.chunk_torch import sequence_lengths
from fla.ops.quasar.cuda.program import LoadedProgram
from fla.ops.quasar.fused_recurrent import fused_recurrent_quasar
from fla.ops.quasar.layer.call import NO_STATES, Call, Projected, States, Weights
from fla.ops.quasar.layer.gate_and_norm import gate_and_norm
from fla.ops.quasar.layer.kernels import causal_conv_silu, gated_rmsnorm
from fla.ops.quasar.layer.products import concatenate_weights, unrounded

if TYPE_CHECKING:
    from fla.ops.quasar.layer.rank_slice import RankSlice  # imports torch.distributed

MANY_TOKENS = 1 << 15
"""From this many tokens on, bf16 products are rounded before the convolution."""


def project(
    program: LoadedProgram | None,
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    save: bool,
    save_products: bool,
) -> Projected:
    """Compute everything before the operator.

    Args:
        program: None, because these kernels need no program.
        call, x, weights: as in `layer_forward`.
        save: whether to return `rows`.
        save_products: whether to return `products`.
    """
    B, T, D = x.shape
    H, S, dtype = call.heads, call.head_dim, call.dtype
    # one cast and one product for q, k, v and `narrow`
    projections, *others = concatenate_weights(weights, dtype)
    rows = x.reshape(B * T, D).to(dtype)
    products = multiply(rows, projections)
    qkv, narrow = products.split([3 * H * S, S], dim=-1)
    # a copy, so that the products, gigabytes for a million tokens, can be freed
    narrow = narrow.to(dtype).contiguous()
    taps, bias = weights.joined_taps()
    position = positions(B, T, call.cu_seqlens, x.device)
    qkv = causal_conv_silu(qkv, taps, bias, position, dtype)
    saved = products if save_products else None
    del products
    beta = F.softplus(weights.beta_log.float())
    last = output_weights(weights, others)
    return Projected(qkv, beta, narrow, last, rows if save else None, saved)


def output_weights(
    weights: Weights, others: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `output`'s weights; `others` are `concatenate_weights`' results after the first."""
    up, bias, out = others
    return up, bias, weights.norm, out


def output(
    program: LoadedProgram | None, call: Call, o: torch.Tensor, p: Projected, shape: tuple[int, ...]
) -> torch.Tensor:
    """Compute y of this shape from o `[R, H, S]` and the results of `project`."""
    *gate_weights, norm_weight, out_weight = p.output_weights
    normed = gated(o, p.narrow, gate_weights, norm_weight, call.eps)
    width = call.heads * call.head_dim
    # y itself must not be a view, because callers may overwrite it
    return F.linear(normed.view(*shape[:-1], width), out_weight)


def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
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


def layer_with_states(
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    before: States = NO_STATES,
    keep: bool = False,
    overwrite: bool = False,
    rank: RankSlice | None = None,
) -> tuple[torch.Tensor, States]:
    """Compute y `[B, T, hidden]`, and the states after x; all matrix products in the call's dtype.

    Args:
        call, x, weights: as in `layer_forward`.
        before: the states before x.
        keep: whether to return the operator's state; the convolution's is returned if there was
            one before x.
        overwrite: whether the recurrent operator writes the new state to the old one's storage.
        rank: x is this rank's slice; its halo is read.
    """
    x, bounds, extra = (x, call.cu_seqlens, 0) if rank is None else rank.with_halo(x)
    B, T, D = x.shape
    H, S, dtype, conv = call.heads, call.head_dim, call.dtype, before.conv
    with torch_private.no_autocast():
        # one cast and one product for q, k, v and `narrow`; with 2-D rows, the gate's product adds
        # its bias
        projections, *gate_weights, out_weight = concatenate_weights(weights, dtype)
        exact = multiply if weights.q_taps is not None and conv is None else F.linear
        products = exact(x.reshape(B * T, D).to(dtype), projections)
        qkv, narrow = products.split([3 * H * S, S], dim=-1)
        # a copy, so that the products, gigabytes for a million tokens, can be freed
        narrow = narrow.to(dtype).contiguous()
        if weights.q_taps is not None:
            taps, bias = weights.joined_taps()
            qkv, conv = convolve(qkv.view(B, T, 3 * H * S), taps, bias, bounds, conv, dtype)
        del products
        if extra:
            T, qkv, narrow = T - extra, qkv.view(B, T, 3 * H * S)[:, extra:], narrow[extra:]
        q, k, v = qkv.reshape(B, T, 3, H, S).unbind(2)
        o, state = operate(call, q, k, v, weights.beta_log, before.operator, keep, overwrite, rank)
        del q, k, v, qkv
        o = gated(o, narrow, gate_weights, weights.norm, call.eps)
        y = F.linear(o.view(B, T, H * S), out_weight)
    return y, States(conv, state)


def operate(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta_log: torch.Tensor,
    state: torch.Tensor | None,
    keep: bool,
    overwrite: bool,
    rank: RankSlice | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the operator's output `[B, T, H, S]` and its state.

    `state` is the one before the call; `keep`, `overwrite` and `rank` are as in
    `layer_with_states`.
    """
    beta = F.softplus(beta_log if call.dtype == torch.float64 else beta_log.float())
    if rank is not None:
        o, rank.final = chunk_quasar(
            q, k, v, beta, output_final_state=True, cp_context=rank.context
        )
        return o, rank.final
    if call.recurrent:
        return fused_recurrent_quasar(
            q, k, v, beta, state, keep, call.cu_seqlens, inplace_state=overwrite
        )
    return chunk_quasar(q, k, v, beta, state, keep, call.cu_seqlens)


def convolve(
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    state: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return silu of the convolved x `[B, T, C]`, and the new state.

    `state` `[N, C, W]` holds the inputs before each sequence. If it is None, the sequences start
    from zeros and the new state is None.
    """
    B, T, C = x.shape
    if state is None:
        position = positions(B, T, cu_seqlens, x.device)
        y = causal_conv_silu(x.reshape(B * T, C), taps, bias, position, dtype)
        return y.view(B, T, C), None
    if cu_seqlens is not None:
        parts = x.split(sequence_lengths(cu_seqlens, B, T), dim=1)
        results = [
            convolve(part, taps, bias, None, before, dtype)
            for part, before in zip(parts, state.split(1), strict=True)
        ]
        ends = [end for _, end in results if end is not None]
        return torch.cat([y for y, _ in results], dim=1), torch.cat(ends)
    W = state.shape[-1]
    x = torch.cat([state.mT.to(x.dtype), x], dim=1)
    y, _ = convolve(x, taps, bias, None, None, dtype)
    return y[:, W:], x[:, -W:].mT.contiguous()


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
