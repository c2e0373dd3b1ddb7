"""Decoding with the adaptive layer: a few tokens after cached states, by one CUDA graph.

The caller's states are read and never overwritten, because other code may hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fla.ops.quasar import torch_private
from fla.ops.quasar.fused_recurrent import run_recurrent
from fla.ops.quasar.layer.adaptive import cast_weights, input_dtypes, rows_of
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.first_step import OPERATOR_DTYPE, AdaptiveWeights
from fla.ops.quasar.layer.gate_and_norm import gate_and_norm
from fla.ops.quasar.layer.graphs import Inputs, Operation, Tensors, launch_or_replay
from fla.ops.quasar.layer.library import convolve, multiply
from fla.ops.quasar.layer.operator_inputs import Rotation, launch_operator_inputs

MAX_STATE = 1 << 22
"""Most elements of the operator's states in a graph, 16 MB: a replay copies them in and out."""


def decode(
    call: Call,
    owner: object,
    rotation: Rotation | None,
    x: torch.Tensor,
    weights: AdaptiveWeights,
    parts: Sequence[torch.Tensor],
    state: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Return y `[B, T, hidden]` and the new states; it records nothing for autograd.

    Args:
        call, owner, rotation, x, weights: as in `run_adaptive`; no packed sequences.
        parts: the convolutions' states of q, k and v, each `[B, H S, taps]`.
        state: the operator's, `[B, H, S, S]`.
    """
    inputs = (x, *parts, state, *(rotation or ()))
    owner = owner if state.numel() <= MAX_STATE else None
    with torch_private.no_autocast():
        tensors = weights.tensors()
        outputs: Any
        outputs, _ = launch_or_replay(owner, DECODE, call, inputs, tensors, call.dtype)
    y, state, *parts = outputs
    return y, tuple(parts), state


def _compute_decode(call: Call, inputs: Inputs, tensors: Tensors) -> tuple[Tensors, Tensors]:
    x, q_part, k_part, v_part, state, *tables = inputs
    weights, rotation = AdaptiveWeights.of(tensors), Rotation(*tables) if tables else None
    (B, T, _), H, S = x.shape, call.heads, call.head_dim
    C = 3 * H * S
    product, *gate, out = cast_weights(weights, call.dtype)
    mixed = multiply(rows_of(call, x), product)
    qkv, narrow, logits = mixed[:, : C + S + H].split([C, S, H], dim=-1)
    taps, shift = weights.layer.joined_taps()
    before = torch.cat([q_part, k_part, v_part], dim=1)
    y, end = convolve(qkv.view(B, T, C), taps, shift, None, before, OPERATOR_DTYPE)
    q, k, v = y.reshape(B * T, 3, H, S).unbind(1)
    q, k, step, _ = launch_operator_inputs(
        q, k, logits, weights.layer.beta_log, weights.dt_bias, rotation, overwrite=True
    )
    q, k, v = (t.view(B, T, H, S) for t in (q, k, v))
    o, state = run_recurrent(q, k, v, step.view(B, T, H), state, True, None, S**-0.5)
    narrow = narrow.to(call.dtype).contiguous()
    normed = gate_and_norm(o.view(-1, H, S), narrow, *gate, weights.layer.norm, call.eps)
    y = F.linear(normed.view(B, T, H * S), out)
    return [y, state, *(part.to(q_part.dtype).contiguous() for part in end.chunk(3, 1))], ()


DECODE = Operation(_compute_decode, lambda *_: None, input_dtypes)
"""A few tokens after cached states. The inputs are x, the convolutions' states, the operator's, and
the rotation's tables; the outputs are y, the operator's new state and the convolutions'."""


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
