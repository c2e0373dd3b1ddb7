"""The layer's operations around the operator: short convolution and gated norm.

On CUDA, each pass is one Triton kernel; gradients.py has those of the backward pass. The forward
pass saves only its inputs. For other calls, autograd records the steps in torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fla.ops.quasar.device import on_its_device, once_differentiable
from fla.ops.quasar.triton_kernels.device_functions import operand
from fla.ops.quasar.triton_kernels.launch import Launcher, padded
from fla.ops.quasar.layer.gradients import (
    conv_row,
    launch_conv_silu_grad,
    launch_gated_rmsnorm_grad,
    load_taps,
    sequences,
    sigmoid,
)

CONV_TAPS = 4
"""The number of taps that the Triton kernels support; other convolutions are computed by torch."""


@triton.jit
def _conv_silu_row(x0, x1, x2, x3, w0, w1, w2, w3, bias, place, PACKED: tl.constexpr):
    y, _, _, _ = conv_row(x0, x1, x2, x3, w0, w1, w2, w3, bias, place, PACKED)
    return y * sigmoid(y)


@triton.jit(do_not_specialize=["T"])
def causal_conv_silu_kernel(
    x, weight, bias, position, y, T,
    stride_x,
    C: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Convolve ROWS rows of BC channels with 4 causal taps, then apply silu.

    x `[B * T, C]` has B sequences of T rows, which are `stride_x` apart; y is contiguous. Rows
    before a sequence count as zeros. With PACKED, the T rows contain several sequences, and
    `position` `[T]` has each row's place in its sequence. Each row is read once; four rows are
    computed while the next four are loaded. Grid: (B * ceil(T / ROWS), C / BC).
    """
    blocks = tl.cdiv(T, ROWS)
    before = (tl.program_id(0) // blocks).to(tl.int64) * T  # rows of other sequences
    place = tl.program_id(0) % blocks * ROWS  # of the first row in its sequence
    first = before + place
    own_rows = tl.minimum(ROWS, T - place)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    w0, w1, w2, w3, b = load_taps(weight, bias, cols, inside, BC, HAS_BIAS)
    p_x = x + first * stride_x + cols
    p_y = y + first * C + cols
    h3 = tl.load(p_x - 3 * stride_x, mask=inside & (place > 0), other=0.0).to(tl.float32)
    h2 = tl.load(p_x - 2 * stride_x, mask=inside & (place > 0), other=0.0).to(tl.float32)
    h1 = tl.load(p_x - stride_x, mask=inside & (place > 0), other=0.0).to(tl.float32)
    n0 = tl.load(p_x, mask=inside & (own_rows > 0), other=0.0)
    n1 = tl.load(p_x + stride_x, mask=inside & (own_rows > 1), other=0.0)
    n2 = tl.load(p_x + 2 * stride_x, mask=inside & (own_rows > 2), other=0.0)
    n3 = tl.load(p_x + 3 * stride_x, mask=inside & (own_rows > 3), other=0.0)
    for row in range(0, ROWS, 4):
        x0, x1 = n0.to(tl.float32), n1.to(tl.float32)
        x2, x3 = n2.to(tl.float32), n3.to(tl.float32)
        p_x += 4 * stride_x
        n0 = tl.load(p_x, mask=inside & (row + 4 < own_rows), other=0.0)
        n1 = tl.load(p_x + stride_x, mask=inside & (row + 5 < own_rows), other=0.0)
        n2 = tl.load(p_x + 2 * stride_x, mask=inside & (row + 6 < own_rows), other=0.0)
        n3 = tl.load(p_x + 3 * stride_x, mask=inside & (row + 7 < own_rows), other=0.0)
        p0, p1, p2, p3 = 0, 0, 0, 0
        if PACKED:
            p_at = position + place + row
            p0 = tl.load(p_at, mask=row < own_rows, other=0)
            p1 = tl.load(p_at + 1, mask=row + 1 < own_rows, other=0)
            p2 = tl.load(p_at + 2, mask=row + 2 < own_rows, other=0)
            p3 = tl.load(p_at + 3, mask=row + 3 < own_rows, other=0)
        y0 = _conv_silu_row(x0, h1, h2, h3, w0, w1, w2, w3, b, p0, PACKED)
        y1 = _conv_silu_row(x1, x0, h1, h2, w0, w1, w2, w3, b, p1, PACKED)
        y2 = _conv_silu_row(x2, x1, x0, h1, w0, w1, w2, w3, b, p2, PACKED)
        y3 = _conv_silu_row(x3, x2, x1, x0, w0, w1, w2, w3, b, p3, PACKED)
        tl.store(p_y, operand(y0, y.dtype.element_ty), mask=inside & (row < own_rows))
        tl.store(p_y + C, operand(y1, y.dtype.element_ty), mask=inside & (row + 1 < own_rows))
        tl.store(p_y + 2 * C, operand(y2, y.dtype.element_ty), mask=inside & (row + 2 < own_rows))
        tl.store(p_y + 3 * C, operand(y3, y.dtype.element_ty), mask=inside & (row + 3 < own_rows))
        h1, h2, h3 = x3, x2, x1
        p_y += 4 * C


@triton.jit(do_not_specialize=["R"])
def gated_rmsnorm_kernel(
    x, gate, weight, y, R, eps, S: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr
):
    """Write rmsnorm(x) * weight * sigmoid(gate) for BR contiguous rows of S; grid: (R / BR,)."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BS)
    at = rows[:, None] * S + cols[None, :]
    mask = (rows < R)[:, None] & (cols < S)[None, :]
    b_x = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    b_g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(weight + cols, mask=cols < S, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / S + eps)
    b_y = b_x * scale[:, None] * b_w[None, :] * sigmoid(b_g)
    tl.store(y + at, b_y.to(y.dtype.element_ty), mask=mask)


_conv_silu = Launcher(causal_conv_silu_kernel)
_gated_rmsnorm = Launcher(gated_rmsnorm_kernel)


def launch_conv_silu(x, weight, bias, position, dtype=None) -> torch.Tensor:
    """Launch the convolution kernel over `[R, C]` rows; weight `[C, 4]`, y in `dtype` or x's."""
    R, C = x.shape
    y = torch.empty(R, C, dtype=dtype or x.dtype, device=x.device)
    if R * C:
        T, position = sequences(position, R)
        rows = 64 if R >= 1 << 15 and T >= 64 else 16
        block = min(512, padded(C))
        _conv_silu(
            (R // T * -(-T // rows), -(-C // block), 1),
            (x, weight, bias, position, y, T, x.stride(0)),
            (C, rows, block, bias is not None, position is not None),
            num_warps=4,
        )
    return y


def launch_gated_rmsnorm(x, gate, weight, eps) -> torch.Tensor:
    """Launch the norm kernel over contiguous `[R, S]` rows."""
    R, S = x.shape
    y = torch.empty_like(x)
    if R:
        block = padded(S)
        rows = max(1, 2048 // block)
        _gated_rmsnorm(
            (-(-R // rows), 1, 1), (x, gate, weight, y, R, eps), (S, block, rows), num_warps=2
        )
    return y


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def conv_silu_torch(x, weight, bias, position, dtype=None) -> torch.Tensor:
    """Compute the same convolution in torch, differentiably, with any number of taps."""
    if isinstance(position, int):
        position = torch.arange(x.shape[0], device=x.device) % position
    wide, taps = _wide(x), _wide(weight)
    y = wide * taps[:, -1]
    for j in range(1, min(taps.shape[1], x.shape[0])):
        before = wide[:-j]
        if position is not None:
            before = before.where((position[j:] >= j)[:, None], 0)
        y[j:].addcmul_(before, taps[:, -1 - j])
    return F.silu(y if bias is None else y + bias).to(dtype or x.dtype)


def gated_rmsnorm_torch(x, gate, weight, eps) -> torch.Tensor:
    """Compute the same gated norm in torch, differentiably."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight * torch.sigmoid(_wide(gate))).to(x.dtype)


def _on_triton(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def _takes_convolution(x, weight) -> bool:
    return _on_triton(x) and weight.shape[1] == CONV_TAPS and x.stride(1) == 1


class CausalConvSiluFunction(torch.autograd.Function):
    """Saves only its inputs; the backward pass computes the convolution again."""

    @staticmethod
    def forward(ctx, x, weight, bias, position):
        ctx.position = position
        weight, bias = (None if p is None else p.contiguous() for p in (weight, bias))
        ctx.save_for_backward(x, weight, bias)
        return launch_conv_silu(x, weight, bias, position)

    @staticmethod
    @once_differentiable
    @on_its_device
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dweight, dbias = launch_conv_silu_grad(
            x, weight, bias, ctx.position, (dy.contiguous(),), dx
        )
        return dx, dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype), None


class GatedRMSNormFunction(torch.autograd.Function):
    """Saves only its inputs; the backward pass computes the norm again."""

    @staticmethod
    def forward(ctx, x, gate, weight, eps):
        x, gate = x.contiguous(), gate.contiguous()
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return launch_gated_rmsnorm(x, gate, weight, eps)

    @staticmethod
    @once_differentiable
    @on_its_device
    def backward(ctx, dy):
        x, gate, weight = ctx.saved_tensors
        x, gate, dy = (t.unsqueeze(1) for t in (x, gate, dy.contiguous()))
        dx, dgate, dweight, _ = launch_gated_rmsnorm_grad(x, gate, weight, dy, ctx.eps)
        return dx.squeeze(1), dgate.squeeze(1), dweight.to(weight.dtype), None


@on_its_device
def causal_conv_silu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    position: torch.Tensor | int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return silu of a causal depthwise convolution along the rows.

    Args:
        x: `[R, C]`, rows of any stride; R tokens of one or more sequences, one after the other.
        weight: `[C, W]`; the last tap multiplies the token itself.
        bias: `[C]` or None.
        position: `[R]` int32, each token's place in its own sequence; or the number of tokens of
            each sequence if all have the same; or None for one sequence.
        dtype: the result's dtype; None is x's.

    Returns:
        `[R, C]`, computed in fp32 (fp64 for fp64 x). Gradients reach x, weight, bias.
    """
    if not _takes_convolution(x, weight):
        return conv_silu_torch(x, weight, bias, position, dtype)
    if not torch.is_grad_enabled():
        return launch_conv_silu(x, weight.contiguous(), bias, position, dtype)
    y = CausalConvSiluFunction.apply(x, weight, bias, position)
    return y if dtype is None else y.to(dtype)


@on_its_device
def gated_rmsnorm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return rmsnorm(x) * weight * sigmoid(gate), the norm over the last dimension.

    Args:
        x, gate: `[R, S]`, any floating dtype.
        weight: `[S]`.
        eps: added to the mean square.

    Returns:
        `[R, S]` in x's dtype, computed in fp32 (fp64 for fp64 x). Gradients reach all three.
    """
    if not _on_triton(x):
        return gated_rmsnorm_torch(x, gate, weight, eps)
    if not torch.is_grad_enabled():
        return launch_gated_rmsnorm(x.contiguous(), gate.contiguous(), weight, eps)
    return GatedRMSNormFunction.apply(x, gate, weight, eps)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
