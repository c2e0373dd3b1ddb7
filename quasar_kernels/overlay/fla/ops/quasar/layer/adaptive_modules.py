"""The adaptive layer by calling its submodules: with caches, on ranks, and if one was changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla.ops.quasar.chunk import run_chunks
from fla.ops.quasar.fused_recurrent import run_recurrent
from fla.ops.quasar.layer.library import convolve
from fla.ops.quasar.layer.operator_inputs import Rotation, operator_inputs
from fla.ops.quasar.layer.wrapped import convolve_module, is_plain

if TYPE_CHECKING:
    from fla.ops.quasar.layer.rank_slice import RankSlice  # imports torch.distributed

_PROJECTIONS = ("q", "k", "v")


def mix_by_modules(
    layer: Any,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    rotation: Rotation | None,
    parts: Sequence[torch.Tensor] | None,
    state: torch.Tensor | None,
    keep: bool,
    decodes: bool,
    rank: RankSlice | None,
) -> tuple[torch.Tensor, Sequence[torch.Tensor] | None, torch.Tensor | None]:
    """Return y, and the states of the convolutions and of the operator after x.

    Args:
        layer: the `AdaptiveQuasarAttention`.
        x: `[B, T, hidden]`.
        cu_seqlens: bounds of packed sequences, or None.
        rotation: of q and k, or None.
        parts, state: the states before x; None is zero.
        keep: whether to return states; otherwise they may be None.
        decodes: whether the operator processes one token after the other.
        rank: x is this rank's slice.
    """
    B, T, _ = x.shape
    H, S, own, before = layer.num_heads, layer.head_dim, x, 0
    if rank is not None:
        rank.exchange_halo(x)
        x, cu_seqlens, before = rank.with_halo(x)
    qkv = [getattr(layer, f"{name}_proj")(x) for name in _PROJECTIONS]
    logits, gate = layer.b_proj(own), layer.g_proj(own)
    if not layer.use_short_conv:
        qkv = [F.silu(part) for part in qkv]
    else:
        qkv, parts = _convolve(layer, qkv, cu_seqlens, parts, keep)
    with torch.autocast(x.device.type, enabled=False):
        q, k, v = torch.cat(qkv, dim=-1)[:, before:].reshape(B * T, 3, H, S).unbind(1)
        q, k, step = operator_inputs(
            q, k, logits.reshape(B * T, H), layer.A_log, layer.dt_bias, rotation
        )
        q, k, v = (t.view(B, T, H, S) for t in (q, k, v))
        inputs = q, k, v, step.view(B, T, H), state, keep, cu_seqlens, S**-0.5
        if decodes:
            o, state = run_recurrent(*inputs)
        else:
            context = None if rank is None else rank.context
            o, state = run_chunks(*inputs, cp_context=context)
    o = layer.o_norm(o, gate.view(o.shape))
    return layer.o_proj(o.view(B, T, layer.value_dim)), parts, state


def _convolve(
    layer: Any,
    qkv: list[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    parts: Sequence[torch.Tensor] | None,
    keep: bool,
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...] | None]:
    """Return silu of the convolved q, k and v, and the convolutions' states, if there are any.

    Unchanged convolutions are computed at once; if one was changed, the modules are called.
    """
    names = [f"{name}_conv1d" for name in _PROJECTIONS]
    modules = [getattr(layer, name) for name in names]
    states: list[torch.Tensor | None] = [None] * 3
    if parts is not None:
        states = [part.to(qkv[0].dtype) for part in parts]
    elif keep:
        count = qkv[0].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        states = [qkv[0].new_zeros(count, layer.key_dim, layer.conv_size)] * 3
    if not all(is_plain(module, nn.Conv1d) for module in modules):
        mixed = [
            convolve_module(layer, name, part, cu_seqlens, state)
            for name, part, state in zip(names, qkv, states, strict=True)
        ]
        ends = tuple(end for _, end in mixed if end is not None)
        return [y for y, _ in mixed], ends or None
    with torch.autocast(qkv[0].device.type, enabled=False):
        taps = torch.cat([module.weight for module in modules]).squeeze(1)
        shift = torch.cat([module.bias for module in modules]) if layer.conv_bias else None
        before = None if states[0] is None else torch.cat(states, dim=1)  # type: ignore[arg-type] # all are set
        rows = torch.cat(qkv, dim=-1)
        y, end = convolve(rows, taps, shift, cu_seqlens, before, rows.dtype)
    after = None if end is None else tuple(part.contiguous() for part in end.chunk(3, dim=1))
    return [*y.chunk(3, dim=-1)], after


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
