"""q, k and v of tokens at the start of sequences, for kernels that process one long sequence.

Such a kernel can process several adjacent sequences as one. Only the convolution of each sequence's
first three tokens then wrongly reads the previous sequence. This module computes these tokens again
and replaces the kernel's results. It does the same for the first tokens of a rank's slice: their
convolution reads tokens of earlier ranks, the halo.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.layer.gradients import load_taps, sigmoid
from fla.ops.quasar.triton_kernels.device_functions import operand
from fla.ops.quasar.triton_kernels.launch import Launcher

CHANNELS = 64
"""Output channels of one program."""
FEW, MANY = 4, 16
"""Sequences of one program. FEW fill a tensor core's tile; with MANY, the weights are read by fewer
programs."""


@triton.jit
def _products(
    x, weight, rows, inside, cols, D: tl.constexpr, BD: tl.constexpr, DTYPE: tl.constexpr
):
    """Return x[rows] times the transpose of weight[cols], of a weight `[., D]`, in fp32."""
    total = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
    for first in range(0, D, BD):
        at = first + tl.arange(0, BD)
        b_x = tl.load(x + rows[:, None] * D + at[None, :], mask=inside[:, None], other=0.0)
        b_w = tl.load(weight + cols[None, :] * D + at[:, None])
        total = tl.dot(
            operand(b_x.to(tl.float32), DTYPE), operand(b_w.to(tl.float32), DTYPE), acc=total
        )
    return total


@triton.jit(do_not_specialize=["N", "T"])
def first_tokens_kernel(
    x, q_weight, k_weight, v_weight, q_taps, k_taps, v_taps, bounds, qkv, N, T,
    D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Write q, k and v of the first three tokens of BN sequences; grid: (N / BN, 3 C / BC).

    x `[R, D]`, the weights `[C, D]`, their taps `[C, 4]` and qkv `[R, 3 C]` are contiguous.
    Sequence n begins at row T n; with PACKED, at `bounds[n]`, and ends before `bounds[n + 1]`.
    """
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    row = tl.arange(0, 4 * BN)  # four for each sequence, of which the last is unused
    sequence, place = tl.program_id(0) * BN + row // 4, row % 4
    own = tl.program_id(0) * BN + tl.arange(0, BN)
    if PACKED:
        first = tl.load(bounds + sequence, mask=sequence < N, other=0).to(tl.int64)
        length = tl.load(bounds + sequence + 1, mask=sequence < N, other=0).to(tl.int64) - first
        start = tl.load(bounds + own, mask=own < N, other=0).to(tl.int64)
        tokens = tl.load(bounds + own + 1, mask=own < N, other=0).to(tl.int64) - start
    else:
        first, length = sequence.to(tl.int64) * T, tl.where(sequence < N, T, 0)
        start, tokens = own.to(tl.int64) * T, tl.where(own < N, T, 0)
    rows, inside = first + place, (place < 3) & (place < length)
    part = tl.program_id(1) // (C // BC)
    cols = tl.program_id(1) % (C // BC) * BC + tl.arange(0, BC)
    if part == 0:
        products = _products(x, q_weight, rows, inside, cols, D, BD, DTYPE)
        _, w1, w2, w3, _ = load_taps(q_taps, None, cols, cols < C, BC, False)
    elif part == 1:
        products = _products(x, k_weight, rows, inside, cols, D, BD, DTYPE)
        _, w1, w2, w3, _ = load_taps(k_taps, None, cols, cols < C, BC, False)
    else:
        products = _products(x, v_weight, rows, inside, cols, D, BD, DTYPE)
        _, w1, w2, w3, _ = load_taps(v_taps, None, cols, cols < C, BC, False)
    w1, w2, w3 = w1[None, :], w2[None, :], w3[None, :]
    products = tl.reshape(products, [BN, 4, BC])
    at = tl.arange(0, 4)[None, :, None]
    p0 = tl.sum(tl.where(at == 0, products, 0.0), axis=1)
    p1 = tl.sum(tl.where(at == 1, products, 0.0), axis=1)
    p2 = tl.sum(tl.where(at == 2, products, 0.0), axis=1)
    y0, y1, y2 = w3 * p0, w2 * p0 + w3 * p1, w1 * p0 + w2 * p1 + w3 * p2
    to = qkv + start[:, None] * (3 * C) + part * C + cols[None, :]
    tl.store(to, operand(y0 * sigmoid(y0), DTYPE), mask=(tokens > 0)[:, None])
    tl.store(to + 3 * C, operand(y1 * sigmoid(y1), DTYPE), mask=(tokens > 1)[:, None])
    tl.store(to + 6 * C, operand(y2 * sigmoid(y2), DTYPE), mask=(tokens > 2)[:, None])


@triton.jit(do_not_specialize=["halo", "tokens", "stride"])
def halo_tokens_kernel(
    x, q_weight, k_weight, v_weight, q_taps, k_taps, v_taps, q, k, v, halo, tokens,
    stride,
    D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write q, k and v of up to three tokens after up to three of the halo; grid: (3 C / BC,).

    x `[halo + tokens, D]`, the weights `[C, D]` and their taps `[C, 4]` are contiguous. Rows of q,
    k and v `[tokens, C]` are `stride` elements apart.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    place = tl.arange(0, 16)  # 0 to 2: the halo, 3 to 5: the tokens; the rest are unused
    rows = place - 3 + halo
    inside = (rows >= 0) & (place < 3 + tokens)
    part = tl.program_id(0) // (C // BC)
    cols = tl.program_id(0) % (C // BC) * BC + tl.arange(0, BC)
    if part == 0:
        products = _products(x, q_weight, rows, inside, cols, D, BD, DTYPE)
        w0, w1, w2, w3, _ = load_taps(q_taps, None, cols, cols < C, BC, False)
        to = q
    elif part == 1:
        products = _products(x, k_weight, rows, inside, cols, D, BD, DTYPE)
        w0, w1, w2, w3, _ = load_taps(k_taps, None, cols, cols < C, BC, False)
        to = k
    else:
        products = _products(x, v_weight, rows, inside, cols, D, BD, DTYPE)
        w0, w1, w2, w3, _ = load_taps(v_taps, None, cols, cols < C, BC, False)
        to = v
    for token in tl.static_range(3):
        p0 = tl.sum(tl.where((place == token)[:, None], products, 0.0), axis=0)
        p1 = tl.sum(tl.where((place == token + 1)[:, None], products, 0.0), axis=0)
        p2 = tl.sum(tl.where((place == token + 2)[:, None], products, 0.0), axis=0)
        p3 = tl.sum(tl.where((place == token + 3)[:, None], products, 0.0), axis=0)
        y = w0 * p0 + w1 * p1 + w2 * p2 + w3 * p3
        if token < tokens:
            tl.store(to + token * stride.to(tl.int64) + cols, operand(y * sigmoid(y), DTYPE))


_first_tokens, _halo_tokens = Launcher(first_tokens_kernel), Launcher(halo_tokens_kernel)


def replace_first_tokens(
    x: torch.Tensor, weights: Weights, bounds: torch.Tensor | None, count: int, qkv: torch.Tensor
) -> None:
    """Overwrite q, k and v of each sequence's first tokens; inputs before a sequence are zeros.

    The host does not wait for the GPU.

    Args:
        x: `[R, hidden]`, all sequences, one after the other; contiguous, on a GPU.
        weights: the layer's, contiguous, with convolutions of four taps without a bias; hidden and
            H S are multiples of 64.
        bounds: `[N + 1]`, the sequences' bounds in x, integers; a sequence may be empty. None for
            sequences of equal length.
        count: N.
        qkv: `[R, 3 H S]`, contiguous, in the products' dtype.
    """
    (R, D), C = x.shape, weights.q.shape[0]
    block = FEW if count < 16 * FEW else MANY
    bounds = None if bounds is None else bounds.to(x.device).contiguous()
    _first_tokens(
        (-(-count // block), 3 * C // CHANNELS, 1),
        (
            *(x, weights.q, weights.k, weights.v),
            *(weights.q_taps, weights.k_taps, weights.v_taps),
            *(bounds, qkv, count, R // count),
        ),
        (D, C, 64, CHANNELS, block, bounds is not None),
        num_warps=4,
        num_stages=2,
    )


def replace_halo_tokens(
    call: Call, rows: torch.Tensor, weights: Weights, halo: int, qkv: Sequence[torch.Tensor]
) -> None:
    """Overwrite q, k and v of a slice's first tokens by values computed with the halo.

    Args:
        call: the layer's call.
        rows: `[halo + tokens, hidden]`, the inputs before the tokens, then those of the tokens.
        weights: the layer's.
        halo: rows before the tokens; it and `tokens` are at most the convolution's taps - 1.
        qkv: three tensors `[1, T, H, S]`, of which the first `tokens` are written.
    """
    tokens = rows.shape[0] - halo
    if not _is_for_kernel(rows, weights, qkv):
        products = project_rows(call, rows, weights)[halo:].chunk(3, dim=1)
        for x, first in zip(qkv, products, strict=True):
            x[0, :tokens] = first.view(tokens, *x.shape[2:])
        return
    C, D = weights.q.shape
    _halo_tokens(
        (3 * C // CHANNELS, 1, 1),
        (
            *(rows, weights.q, weights.k, weights.v),
            *(weights.q_taps, weights.k_taps, weights.v_taps),
            *(*qkv, halo, tokens, qkv[0].stride(1)),
        ),
        (D, C, 64, CHANNELS),
        num_warps=4,
        num_stages=2,
    )


def _is_for_kernel(rows: torch.Tensor, weights: Weights, qkv: Sequence[torch.Tensor]) -> bool:
    C, D = weights.q.shape
    tensors = (rows, *weights[:3], *weights.taps())
    return (
        rows.is_cuda
        and qkv[0].dtype in (torch.bfloat16, torch.float16)
        and C % CHANNELS == D % 64 == 0
        and weights.q_shift is None
        and all(x is not None and x.is_contiguous() for x in tensors)
        and weights.q_taps is not None
        and weights.q_taps.shape[-1] == 4
        and len({x.stride()[1:] for x in qkv}) == 1
        and qkv[0].stride()[2:] == (qkv[0].shape[3], 1)
    )


def project_rows(call: Call, rows: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Return silu(causal convolution(rows W^T)) for q, k and v, concatenated `[n, 3 H S]`.

    Products and sums are fp32, the result is in the call's dtype. It is differentiable, for any
    number of taps.

    Args:
        rows: `[n, hidden]`, the first tokens of a sequence.
    """
    taps, shift = weights.joined_taps()
    matrix = torch.cat([weights.q, weights.k, weights.v])
    products = F.linear(rows.to(call.dtype).float(), matrix.to(call.dtype).float())
    mixed = F.conv1d(
        F.pad(products.mT, (taps.shape[1] - 1, 0)),
        taps.float().unsqueeze(1),
        None if shift is None else shift.float(),
        groups=taps.shape[0],
    )
    return F.silu(mixed.mT).to(call.dtype)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
