"""The part of the chunk form that needs no state: B = (I + strict_tril(a K K^T))^-1 a.

A chunk's B depends on no other chunk, so the kernel computes all of them in batches of small
matrices before both passes of the segmented scan. This shortens the passes' chain of dependent
products, which limits the speed for short sequences and small batches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.ops.quasar.triton_kernels.device_functions import (
    inverse_pointers,
    load_segment,
    row_pointers,
    split,
    token_pointers,
    unit_lower_inverse,
)
from fla.ops.quasar.gate import quasar_step_size
from fla.ops.quasar.operator_types import StepSizes
from fla.ops.quasar.triton_kernels.launch import Launcher
from fla.ops.quasar.triton_kernels.plan import Plan


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def chunk_intra_kernel(
    k, beta, inverse, table, T, NS, SEG,
    stride_kb, stride_kt, stride_kh, stride_ab, stride_at, stride_ah,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    PACK: tl.constexpr, PRECISION: tl.constexpr, READ_STEP: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Write B of a segment's chunks, N chunks at a time, for one head.

    With kappa = sqrt(a) k, no entry of M = strict_tril(kappa kappa^T) or of the inverse exceeds 1,
    because |kappa|^2 = 1 - exp(-beta |k|^2). So fp16 operands cannot overflow and have the digits
    of tf32. With READ_STEP, beta contains the step size a of each token and head, and the caller
    must bound a |k|^2.
    Grid: (segments * H, programs that share a segment).
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_b, _, t0, length, _, _ = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    if not READ_STEP:
        beta_h = tl.load(beta + i_h).to(tl.float32)
    tokens = tl.arange(0, N * C)
    cols = tl.arange(0, BS)
    rows = tl.arange(0, C)[None, :, None]
    before = tl.arange(0, C)[None, None, :]
    DTYPE: tl.constexpr = inverse.dtype.element_ty
    OPERAND: tl.constexpr = tl.float32 if DTYPE == tl.float32 else tl.float16
    for t in range(tl.program_id(1) * N * C, length, tl.num_programs(1) * N * C):
        mask = (tokens < length - t)[:, None]
        p_k = row_pointers(k, i_b, t0 + t, i_h, stride_kb, stride_kt, stride_kh, tokens, cols)
        b_k = tl.load(p_k, mask=mask & (cols < S)[None, :], other=0.0)
        b_k = tl.reshape(b_k, [N, C, BS])
        KK = tl.dot(b_k, tl.permute(b_k, (0, 2, 1)), input_precision=PRECISION)
        if READ_STEP:
            p_beta = token_pointers(beta, i_b, t0 + t, i_h, T, H, tokens)
            a = tl.reshape(tl.load(p_beta, mask=tokens < length - t, other=0.0), [N, C])
        else:
            a = quasar_step_size(tl.sum(tl.where(rows == before, KK, 0.0), axis=2), beta_h)
        root = tl.sqrt(a)
        scale = root[:, :, None] * root[:, None, :]
        A = unit_lower_inverse(tl.where(rows > before, KK, 0.0) * scale, OPERAND, PRECISION)
        B = tl.reshape(A * scale, [N * C, C])
        p_a = inverse_pointers(
            inverse, i_b, t0 + t, i_h, stride_ab, stride_at, stride_ah, tokens, C, PACK
        )
        if DTYPE == tl.float32:
            tl.store(p_a, B, mask=mask)
        else:
            high, low = split(B, DTYPE)
            tl.store(p_a, high, mask=mask)
            tl.store(p_a + C, low, mask=mask)


_intra = Launcher(chunk_intra_kernel)


def inverse_width(chunk: int, dtype: torch.dtype) -> int:
    """Return the number of elements in a row of B: C in fp32, otherwise C high and C low parts."""
    return chunk * (1 if dtype == torch.float32 else 2)


def rows_packed(chunk: int, dtype: torch.dtype, columns: int) -> int:
    """Return how many rows of B fit into `columns` elements: a power of two, at most a chunk."""
    fit = columns // inverse_width(chunk, dtype)
    return min(chunk, 1 << (fit.bit_length() - 1))


def chunk_intra(
    plan: Plan, k: torch.Tensor, steps: StepSizes, scratch: torch.Tensor | None
) -> torch.Tensor:
    """Compute B = A a of every chunk of the plan; no gradients.

    Args:
        plan: how the sequences are cut.
        k: `[B, T, H, S]`, bf16, fp16 or fp32, last stride 1.
        steps: the step sizes or beta, fp32 contiguous.
        scratch: None, or a tensor `[B, T, H, S]` in k's dtype, last stride 1. If its rows are wide
            enough, the matrices B are stored there. A kernel that later overwrites the rows of a
            chunk must first read the chunk's matrix from them.

    Returns:
        The tensor with B: `scratch`, or a new tensor `[B, T, H, inverse_width]`.
    """
    B, T, H, S = k.shape
    tiles, width = plan.tiles, inverse_width(plan.tiles.chunk, k.dtype)
    if scratch is None or width > S:
        scratch = torch.empty(B, T, H, width, dtype=k.dtype, device=k.device)
    blocks = -(-plan.longest // (tiles.intra_chunks * tiles.chunk))
    shares = max(1, min(blocks, plan.wave // max(1, plan.total * H)))
    _intra(
        (plan.total * H, shares, 1),
        (k, steps.values, scratch, plan.table, T, plan.per_sequence, plan.length,
         *k.stride()[:3], *scratch.stride()[:3]),
        (H, S, plan.block, tiles.chunk, tiles.intra_chunks,
         rows_packed(tiles.chunk, k.dtype, scratch.shape[-1]), plan.precision, steps.per_token,
         plan.table is not None),
        num_warps=tiles.intra_warps, num_stages=tiles.intra_stages,
    )  # fmt: skip
    return scratch


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
