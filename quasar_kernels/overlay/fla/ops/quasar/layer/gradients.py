"""Triton kernels of the layer's gradients: of the convolution with SiLU, and of the gated norm.

Each reads its inputs once. A weight's gradient is a sum over all tokens: each program sums its
rows, and torch adds the sums of the programs, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.ops.quasar.triton_kernels.device_functions import operand
from fla.ops.quasar.triton_kernels.launch import Launcher, padded

_PROGRAMS = 4096
"""Target number of programs of a launch. These are several for each program that a GPU runs at a
time, so that it stays busy, and so few that adding their sums takes little time."""
_MAX_GRID_ROWS = 65_535
"""The largest second dimension of CUDA's grids."""


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) with an error of a few ulp.

    This takes a third of the instructions of tl.sigmoid.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def gradient_scale(largest):
    """Return the power of two that brings `largest` to between 1 and 2, and its inverse.

    Gradients times this power keep their digits in fp16 down to 2^-14 of the largest one, and sums
    may be 2^15 times as large as it. The power is finite for any number.
    """
    bits = tl.load(largest).to(tl.float32).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23 & 0xFF, 3), 251)
    scale = (254 - exponent << 23).to(tl.float32, bitcast=True)
    return scale, (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def conv_row(x0, x1, x2, x3, w0, w1, w2, w3, bias, place, PACKED: tl.constexpr):
    """Return a row's convolution, and x1, x2 and x3 as the convolution used them.

    x0 is the row; x1, x2 and x3 are the rows 1, 2 and 3 before it. With PACKED, `place` is the
    row's place in its sequence, and rows before the start of the sequence are replaced by zeros.
    """
    if PACKED:
        x1 = tl.where(place >= 1, x1, 0.0)
        x2 = tl.where(place >= 2, x2, 0.0)
        x3 = tl.where(place >= 3, x3, 0.0)
    return x0 * w3 + x1 * w2 + x2 * w1 + x3 * w0 + bias, x1, x2, x3


@triton.jit
def load_taps(weight, bias, cols, inside, BC: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return four taps and the bias, or -0 without one, of BC channels, in fp32."""
    w0 = tl.load(weight + cols * 4, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(weight + cols * 4 + 1, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(weight + cols * 4 + 2, mask=inside, other=0.0).to(tl.float32)
    w3 = tl.load(weight + cols * 4 + 3, mask=inside, other=0.0).to(tl.float32)
    b = tl.full([BC], -0.0, dtype=tl.float32)  # a compiler can omit x + -0.0, but not x + 0.0
    if HAS_BIAS:
        b += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    return w0, w1, w2, w3, b


@triton.jit
def _conv_row_grad(x0, x1, x2, x3, dy, unscale, w0, w1, w2, w3, bias, place, PACKED: tl.constexpr):
    # return the gradient of the row's convolution before silu, and x1, x2 and x3 as conv_row does
    y, x1, x2, x3 = conv_row(x0, x1, x2, x3, w0, w1, w2, w3, bias, place, PACKED)
    gate = sigmoid(y)
    return dy.to(tl.float32) * unscale * gate * (1.0 + y * (1.0 - gate)), x1, x2, x3


@triton.jit
def _pass_back(g, b1, b2, b3, w0, w1, w2, w3, place, PACKED: tl.constexpr):
    # b1, b2 and b3 are the partial gradients of the three rows before this one, g is the gradient
    # of this row's convolution. Add g's contributions; the complete gradient is returned first.
    g0, g1, g2 = g * w0, g * w1, g * w2
    if PACKED:
        g0 = tl.where(place >= 3, g0, 0.0)
        g1 = tl.where(place >= 2, g1, 0.0)
        g2 = tl.where(place >= 1, g2, 0.0)
    return b3 + g0, g * w3, b1 + g2, b2 + g1


@triton.jit(do_not_specialize=["T", "ROWS"])
def conv_silu_grad_kernel(
    x, weight, bias, position, dy_0, dy_1, dy_2, dx, sums, largest, T, ROWS,
    stride_x, stride_dx,
    C: tl.constexpr, N: tl.constexpr, BC: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Write dx of ROWS rows and BC of C channels, and the sums of their taps' and bias's gradients.

    The channels are those of C / N tensors dy, each `[B * T, N]` contiguous, side by side. x and dx
    are `[B * T, C]`, B sequences of T rows, with row strides stride_x and stride_dx. With PACKED,
    the T rows contain several sequences, and `position` `[T]` holds each row's place in its
    sequence. Each program writes the sums over its rows, fp32 `[5, C]`: the gradients of the four
    taps and of the bias. Unless `largest` is None, dy contains the factor
    `gradient_scale(largest)`; the results do not. The kernel computes the convolution again. A
    row's gradient is complete three rows later, so a program processes ROWS + 4 rows; ROWS is a
    multiple of 4.
    Grid: (B * ceil(T / ROWS), C / N * ceil(N / BC)).
    """
    blocks = tl.cdiv(T, ROWS)
    before = (tl.program_id(0) // blocks).to(tl.int64) * T  # rows of other sequences
    place = tl.program_id(0) % blocks * ROWS  # of the first row in its sequence
    first = before + place
    own_rows = tl.minimum(ROWS, T - place)  # their gradients are written here
    seen_rows = tl.minimum(ROWS + 3, T - place)  # those that they depend on
    part = tl.program_id(1) // tl.cdiv(N, BC)
    own = tl.program_id(1) % tl.cdiv(N, BC) * BC + tl.arange(0, BC)
    inside = own < N
    cols = part * N + own
    w0, w1, w2, w3, b = load_taps(weight, bias, cols, inside, BC, HAS_BIAS)
    unscale = 1.0
    if largest is not None:
        _, unscale = gradient_scale(largest)
    dy = dy_0
    if part == 1:
        dy = dy_1
    if part == 2:
        dy = dy_2
    p_x = x + first * stride_x + cols
    p_dy = dy + first * N + own
    p_dx = dx + (first - 3) * stride_dx + cols
    h3 = tl.load(p_x - 3 * stride_x, mask=inside & (place > 0), other=0.0).to(tl.float32)
    h2 = tl.load(p_x - 2 * stride_x, mask=inside & (place > 0), other=0.0).to(tl.float32)
    h1 = tl.load(p_x - stride_x, mask=inside & (place > 0), other=0.0).to(tl.float32)
    n0 = tl.load(p_x, mask=inside & (seen_rows > 0), other=0.0)
    n1 = tl.load(p_x + stride_x, mask=inside & (seen_rows > 1), other=0.0)
    n2 = tl.load(p_x + 2 * stride_x, mask=inside & (seen_rows > 2), other=0.0)
    n3 = tl.load(p_x + 3 * stride_x, mask=inside & (seen_rows > 3), other=0.0)
    e0 = tl.load(p_dy, mask=inside & (seen_rows > 0), other=0.0)
    e1 = tl.load(p_dy + N, mask=inside & (seen_rows > 1), other=0.0)
    e2 = tl.load(p_dy + 2 * N, mask=inside & (seen_rows > 2), other=0.0)
    e3 = tl.load(p_dy + 3 * N, mask=inside & (seen_rows > 3), other=0.0)
    b1 = tl.zeros([BC], dtype=tl.float32)
    b2 = tl.zeros([BC], dtype=tl.float32)
    b3 = tl.zeros([BC], dtype=tl.float32)
    d0 = tl.zeros([BC], dtype=tl.float32)
    d1 = tl.zeros([BC], dtype=tl.float32)
    d2 = tl.zeros([BC], dtype=tl.float32)
    d3 = tl.zeros([BC], dtype=tl.float32)
    db = tl.zeros([BC], dtype=tl.float32)
    for row in range(0, ROWS + 4, 4):
        x0, x1 = n0.to(tl.float32), n1.to(tl.float32)
        x2, x3 = n2.to(tl.float32), n3.to(tl.float32)
        dy0, dy1, dy2, dy3 = e0, e1, e2, e3
        p_x += 4 * stride_x
        p_dy += 4 * N
        n0 = tl.load(p_x, mask=inside & (row + 4 < seen_rows), other=0.0)
        n1 = tl.load(p_x + stride_x, mask=inside & (row + 5 < seen_rows), other=0.0)
        n2 = tl.load(p_x + 2 * stride_x, mask=inside & (row + 6 < seen_rows), other=0.0)
        n3 = tl.load(p_x + 3 * stride_x, mask=inside & (row + 7 < seen_rows), other=0.0)
        e0 = tl.load(p_dy, mask=inside & (row + 4 < seen_rows), other=0.0)
        e1 = tl.load(p_dy + N, mask=inside & (row + 5 < seen_rows), other=0.0)
        e2 = tl.load(p_dy + 2 * N, mask=inside & (row + 6 < seen_rows), other=0.0)
        e3 = tl.load(p_dy + 3 * N, mask=inside & (row + 7 < seen_rows), other=0.0)
        p0, p1, p2, p3 = 0, 0, 0, 0
        if PACKED:
            p_at = position + place + row
            p0 = tl.load(p_at, mask=row < seen_rows, other=0)
            p1 = tl.load(p_at + 1, mask=row + 1 < seen_rows, other=0)
            p2 = tl.load(p_at + 2, mask=row + 2 < seen_rows, other=0)
            p3 = tl.load(p_at + 3, mask=row + 3 < seen_rows, other=0)
        counts = tl.where(row < own_rows, 1.0, 0.0)  # another program counts the rows after ROWS

        g, m1, m2, m3 = _conv_row_grad(x0, h1, h2, h3, dy0, unscale, w0, w1, w2, w3, b, p0, PACKED)
        done, b1, b2, b3 = _pass_back(g, b1, b2, b3, w0, w1, w2, w3, p0, PACKED)
        wanted = inside & (row > 0) & (row - 3 < own_rows)
        tl.store(p_dx, done.to(dx.dtype.element_ty), mask=wanted)
        g *= counts
        d0, d1, d2, d3, db = d0 + g * m3, d1 + g * m2, d2 + g * m1, d3 + g * x0, db + g

        g, m1, m2, m3 = _conv_row_grad(x1, x0, h1, h2, dy1, unscale, w0, w1, w2, w3, b, p1, PACKED)
        done, b1, b2, b3 = _pass_back(g, b1, b2, b3, w0, w1, w2, w3, p1, PACKED)
        wanted = inside & (row > 0) & (row - 2 < own_rows)
        tl.store(p_dx + stride_dx, done.to(dx.dtype.element_ty), mask=wanted)
        g *= counts
        d0, d1, d2, d3, db = d0 + g * m3, d1 + g * m2, d2 + g * m1, d3 + g * x1, db + g

        g, m1, m2, m3 = _conv_row_grad(x2, x1, x0, h1, dy2, unscale, w0, w1, w2, w3, b, p2, PACKED)
        done, b1, b2, b3 = _pass_back(g, b1, b2, b3, w0, w1, w2, w3, p2, PACKED)
        wanted = inside & (row > 0) & (row - 1 < own_rows)
        tl.store(p_dx + 2 * stride_dx, done.to(dx.dtype.element_ty), mask=wanted)
        g *= counts
        d0, d1, d2, d3, db = d0 + g * m3, d1 + g * m2, d2 + g * m1, d3 + g * x2, db + g

        g, m1, m2, m3 = _conv_row_grad(x3, x2, x1, x0, dy3, unscale, w0, w1, w2, w3, b, p3, PACKED)
        done, b1, b2, b3 = _pass_back(g, b1, b2, b3, w0, w1, w2, w3, p3, PACKED)
        tl.store(p_dx + 3 * stride_dx, done.to(dx.dtype.element_ty), mask=inside & (row < own_rows))
        g *= counts
        d0, d1, d2, d3, db = d0 + g * m3, d1 + g * m2, d2 + g * m1, d3 + g * x3, db + g

        h1, h2, h3 = x3, x2, x1
        p_dx += 4 * stride_dx
    p_sums = sums + tl.program_id(0).to(tl.int64) * 5 * C + cols
    tl.store(p_sums, d0, mask=inside)
    tl.store(p_sums + C, d1, mask=inside)
    tl.store(p_sums + 2 * C, d2, mask=inside)
    tl.store(p_sums + 3 * C, d3, mask=inside)
    tl.store(p_sums + 4 * C, db, mask=inside)


@triton.jit(do_not_specialize=["R", "TILES"])
def gated_rmsnorm_grad_kernel(
    x, gate, weight, dy, y, dx, dgate, sums, largest, R, TILES, eps,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Write dx and dgate of y = rmsnorm(x) * weight * sigmoid(gate), and y unless it is None.

    Unless `largest` is None, dx is multiplied by `gradient_scale(largest)`, and saturates.
    All are `[R, H, S]` contiguous, and the norm is over S. A program processes TILES * BR rows of
    one head, and writes its sums of the weight's gradient and of dgate to `sums`, fp32
    `[R / (TILES * BR), 2, H, S]`. Grid: (H, R / (TILES * BR)).
    """
    head = tl.program_id(0)
    rows = tl.program_id(1).to(tl.int64) * TILES * BR + tl.arange(0, BR)
    cols = tl.arange(0, BS)
    at = (rows * H + head)[:, None] * S + cols[None, :]
    b_w = tl.load(weight + cols, mask=cols < S, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros([BR, BS], dtype=tl.float32)
    d_bias = tl.zeros([BR, BS], dtype=tl.float32)
    if largest is not None:
        up, _ = gradient_scale(largest)
    for _ in range(0, TILES):
        mask = (rows < R)[:, None] & (cols < S)[None, :]
        b_x = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        b_g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
        b_dy = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / S + eps)[:, None]
        b_x *= scale
        b_g = sigmoid(b_g)
        b_dy *= b_g
        part = b_dy * b_x  # the weight's gradient, from this row
        d_weight += part
        part *= b_w
        b_dg = part * (1.0 - b_g)
        d_bias += b_dg
        b_dx = scale * (b_dy * b_w - b_x * (tl.sum(part, axis=1) / S)[:, None])
        if largest is not None:
            b_dx = operand(b_dx * up, dx.dtype.element_ty)
        tl.store(dx + at, b_dx.to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + at, b_dg.to(dgate.dtype.element_ty), mask=mask)
        if y is not None:
            b_y = b_x * b_w * b_g
            tl.store(y + at, b_y.to(y.dtype.element_ty), mask=mask)
        rows += BR
        at += BR * H * S
    p_sums = sums + (tl.program_id(1).to(tl.int64) * 2 * H + head) * S + cols
    tl.store(p_sums, tl.sum(d_weight, axis=0), mask=cols < S)
    tl.store(p_sums + H * S, tl.sum(d_bias, axis=0), mask=cols < S)


_conv_silu_grad = Launcher(conv_silu_grad_kernel)
_gated_rmsnorm_grad = Launcher(gated_rmsnorm_grad_kernel)


def sequences(position: torch.Tensor | int | None, rows: int) -> tuple[int, torch.Tensor | None]:
    """Return the rows per sequence, and the `[R]` places of rows in packed sequences, else None."""
    if isinstance(position, int):
        return position, None
    return rows, position


def launch_conv_silu_grad(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    position: torch.Tensor | int | None,
    dys: tuple[torch.Tensor, ...],
    dx: torch.Tensor,
    largest: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel of the convolution's gradient; it writes dx.

    Args:
        x: `[R, C]`, last stride 1.
        weight: `[C, 4]` contiguous.
        bias: `[C]` contiguous, or None.
        position: `[R]` int32, each token's place in its own sequence; or the number of tokens of
            each sequence if all have the same; or None for one sequence.
        dys: one to three tensors `[R, N]` contiguous; concatenated they are the gradient `[R, C]`
            of the convolution's result.
        dx: `[R, C]`, last stride 1, of any dtype.
        largest: a number, if `dys` contain the factor `gradient_scale(largest)`; otherwise None.

    Returns:
        The gradients of the taps `[C, 4]` and of the bias `[C]`, fp32.
    """
    R, C = x.shape
    N = C // len(dys)
    T, position = sequences(position, R)
    block = min(256, padded(N))
    columns = len(dys) * -(-N // block)
    rows = max(16, min(256, padded(-(-R * columns // _PROGRAMS)), padded(T)))
    programs = R // T * -(-T // rows) if R else 0
    sums = torch.empty(programs, 5, C, dtype=torch.float32, device=x.device)
    if programs:
        dys = (*dys, dys[0], dys[0])[:3]
        _conv_silu_grad(
            (programs, columns, 1),
            (
                *(x, weight, bias, position, *dys, dx, sums, largest),
                *(T, rows, x.stride(0), dx.stride(0)),
            ),
            (C, N, block, bias is not None, position is not None),
            num_warps=4,
        )
    total = sums.sum(0)
    return total[:4].t().contiguous(), total[4]


def launch_gated_rmsnorm_grad(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    dy: torch.Tensor,
    eps: float,
    y: torch.Tensor | None = None,
    *,
    overwrite: bool = False,
    largest: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the gated norm's gradient.

    Args:
        x, gate, dy: `[R, H, S]` contiguous.
        weight: `[S]`.
        eps: added to the mean square.
        y: tensor of x's shape to which the gated norm is written, or None.
        overwrite: whether dx overwrites dy, and dgate overwrites gate.
        largest: None, or a number: dx is then in fp16, multiplied by `gradient_scale(largest)`.

    Returns:
        dx and dgate, like x; the gradient of the weight `[S]` and the sum of dgate over the rows
        `[H, S]`, fp32.
    """
    R, H, S = x.shape
    # a program reads each element before it overwrites it, and no other program reads it
    dx, dgate = (dy, gate) if overwrite else (torch.empty_like(x), torch.empty_like(gate))
    dx = dx if largest is None else dx.view(torch.float16)
    block = padded(S, 8)
    rows = max(1, 512 // block)
    tiles = max(1, min(16, -(-R * H // (rows * _PROGRAMS))), -(-R // (rows * _MAX_GRID_ROWS)))
    programs = -(-R // (rows * tiles))
    sums = torch.empty(programs, 2, H, S, dtype=torch.float32, device=x.device)
    if programs:
        _gated_rmsnorm_grad(
            (H, programs, 1),
            (x, gate, weight, dy, y, dx, dgate, sums, largest, R, tiles, eps),
            (H, S, block, rows),
            num_warps=2,
        )
    total = sums.sum(0)
    return dx, dgate, total[0].sum(0), total[1]


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
