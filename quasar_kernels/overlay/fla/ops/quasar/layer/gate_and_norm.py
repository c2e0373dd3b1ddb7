"""The layer's output gate and norm in one kernel: rmsnorm(o) * weight * sigmoid(narrow W^T + b).

Separate kernels would write and read the gate: two gigabytes for a million tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.ops.quasar.device import on_its_device
from fla.ops.quasar.triton_kernels.device_functions import operand
from fla.ops.quasar.triton_kernels.launch import Launcher, padded

ROWS, WARPS = 64, 8
"""Tokens and warps of a program, the fastest on an H200 for heads of 64 and of 128."""
MANY_TOKENS = 1 << 15
"""From this many tokens on, programs that process all heads fill a GPU."""


@triton.jit(do_not_specialize=["R"])
def gate_and_norm_kernel(
    o, narrow, gate_weight, gate_bias, norm_weight, y, R,
    stride_n,
    eps,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write BR tokens of HEADS heads of y. Grid: (tokens / BR, H / HEADS).

    o and y `[R, H, S]` are contiguous; narrow `[R, S]` has rows stride_n apart; gate_weight
    `[H * S, S]`, gate_bias `[H * S]` and norm_weight `[S]` are contiguous.
    """
    tokens = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BS)
    inside = (tokens < R)[:, None] & (cols < S)[None, :]
    b_n = tl.load(narrow + tokens[:, None] * stride_n + cols[None, :], mask=inside, other=0.0)
    b_w = tl.load(norm_weight + cols, mask=cols < S, other=0.0).to(tl.float32)
    p_o = tokens[:, None] * (H * S) + cols[None, :]
    # transposed, for the right operand: rows are inputs, columns the head's channels
    p_g = gate_weight + cols[None, :] * S + cols[:, None]
    square = (cols < S)[:, None] & (cols < S)[None, :]
    first = tl.program_id(1) * HEADS
    for h in range(first, tl.minimum(first + HEADS, H)):
        b_o = tl.load(o + p_o + h * S, mask=inside, other=0.0).to(tl.float32)
        b_g = tl.load(p_g + h * S * S, mask=square, other=0.0)
        bias = tl.load(gate_bias + h * S + cols, mask=cols < S, other=0.0).to(tl.float32)
        gate = tl.dot(b_n, b_g) + bias[None, :]
        scale = tl.rsqrt(tl.sum(b_o * b_o, axis=1) / S + eps)
        b_y = b_o * scale[:, None] * b_w[None, :] * tl.sigmoid(gate)
        tl.store(y + p_o + h * S, operand(b_y, y.dtype.element_ty), mask=inside)


_gate_and_norm = Launcher(gate_and_norm_kernel)


@on_its_device
def gate_and_norm(
    o: torch.Tensor,
    narrow: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return rmsnorm(o per head) * norm_weight * sigmoid(narrow gate_weight^T + gate_bias).

    It records nothing for autograd.

    Args:
        o: `[R, H, S]`, bf16 or fp16, on a GPU; S at most 128.
        narrow: `[R, S]`, bf16 or fp16, last stride 1.
        gate_weight, gate_bias: `[H * S, S]` and `[H * S]` in narrow's dtype.
        norm_weight: `[S]`.
        eps: added to the mean square.

    Returns:
        `[R, H, S]` contiguous, in narrow's dtype, computed in fp32.
    """
    R, H, S = o.shape
    y = narrow.new_empty(R, H, S)
    if R:
        block = padded(S, 16)
        # a program with all heads reads `narrow` once, but with few tokens more programs are needed
        heads = H if R >= MANY_TOKENS else min(H, 4) if R >= MANY_TOKENS // 4 else 1
        _gate_and_norm(
            (-(-R // ROWS), -(-H // heads), 1),
            (o.contiguous(), narrow, gate_weight.contiguous(), gate_bias.contiguous(), norm_weight,
             y, R, narrow.stride(0), eps),
            (H, S, block, ROWS, heads), num_warps=WARPS, num_stages=1,
        )  # fmt: skip
    return y


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
