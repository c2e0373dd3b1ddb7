"""Device functions that the Triton kernels share: operands, addresses, segments, small inverses."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def operand(x, DTYPE: tl.constexpr):
    """Round fp32 to a product's operand; fp16 saturates instead of turning into infinity.

    NaN stays NaN.
    """
    if DTYPE == tl.float16:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DTYPE)


@triton.jit
def split(x, DTYPE: tl.constexpr):
    """Return fp32 x as two operands; their sum keeps twice the digits of one."""
    if DTYPE == tl.bfloat16:
        # rounded as an integer, because GPUs convert back from bf16 at a sixteenth of this rate;
        # the minimum keeps a GPU's NaN (0x7FFFFFFF), which the addition would turn into a zero
        bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFF7FFF)
        bits = (bits.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000
        rounded = bits.to(tl.float32, bitcast=True)
    else:
        rounded = operand(x, DTYPE).to(tl.float32)
    return rounded.to(DTYPE), operand(x - rounded, DTYPE)


@triton.jit
def dot_split(x, y_high, y_low, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return x (y_high + y_low) and x's leading operand; x is fp32, y_high and y_low operands."""
    if DTYPE == tl.float32:
        return tl.dot(x, y_high, input_precision=PRECISION), x
    else:
        x_high, x_low = split(x, DTYPE)
        product = tl.dot(x_high, y_high)
        product = tl.dot(x_low, y_high, acc=product)
        return tl.dot(x_high, y_low, acc=product), x_high


@triton.jit
def row_pointers(x, i_b, t, i_h, stride_b, stride_t, stride_h, rows, cols):
    """Pointers to rows t + rows of one batch row and head; 64-bit, T * H * S may pass 2^31."""
    start = i_b * stride_b + t * stride_t + i_h * stride_h
    return x + start + rows[:, None] * stride_t + cols[None, :]


@triton.jit
def token_pointers(x, i_b, t, i_h, T, H: tl.constexpr, tokens):
    """Pointers to one head's values at t + tokens, of contiguous [B, T, H]."""
    return x + (i_b * T + t + tokens) * H + i_h


@triton.jit
def _gaps(g):
    # [C, C]: the log decays of the rows' tokens that come after the columns' tokens
    index = tl.arange(0, g.shape[0])
    return tl.where(index[:, None] > index[None, :], g[:, None], 0.0)


@triton.jit
def decays_between(g, since, DTYPE: tl.constexpr):
    """Return Gamma [C, C], the decay from a column's token to a row's; 1 above the diagonal.

    A difference of running sums loses digits of weak decays after strong ones. This error exceeds
    the rounding of fp32 operands, so for these only the decays of the tokens in between are summed.

    Args:
        g: log decays of a chunk's tokens [C].
        since: their running sums.
        DTYPE: of the products' operands.
    """
    if DTYPE == tl.float32:
        return tl.exp(tl.cumsum(_gaps(g), axis=0))
    else:
        return tl.exp(tl.minimum(since[:, None] - since[None, :], 0.0))


@triton.jit
def log_decays_after(g, since, whole, DTYPE: tl.constexpr):
    """Return the log decay after each token [C] of a chunk; `whole` is the chunk's."""
    if DTYPE == tl.float32:
        return tl.sum(_gaps(g), axis=0)
    else:
        return whole - since


@triton.jit
def load_segment(table, i_s, T, NS, SEG, IS_VARLEN: tl.constexpr):
    """Return segment i_s's batch row, sequence, first token, length, is_first and is_last."""
    if IS_VARLEN:
        row = table + i_s * 4
        i_n = tl.load(row)
        t0 = tl.load(row + 1)
        length = tl.load(row + 2)
        place = tl.load(row + 3)
        return i_n * 0, i_n, t0, length.to(tl.int32), (place & 1) != 0, (place & 2) != 0
    else:
        i_n = (i_s // NS).to(tl.int64)
        i = i_s % NS
        t0 = i.to(tl.int64) * SEG
        length = tl.minimum(T - t0, SEG).to(tl.int32)
        return i_n, i_n, t0, length, i == 0, i == NS - 1


@triton.jit
def load_entering_state(
    initial_state, states, i_sh, own, at, inside, is_first,
    ROWS: tl.constexpr, COLS: tl.constexpr, S: tl.constexpr, H: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_STATES: tl.constexpr,
):  # fmt: skip
    """Return the state [ROWS, COLS] that enters segment and head i_sh; zero if there is none.

    `at` are offsets into one [S, S] state, `own` the sequence's place in [N, H, S, S].
    """
    state = tl.zeros([ROWS, COLS], dtype=tl.float32)
    if is_first:
        if HAS_INITIAL:
            state += tl.load(initial_state + own + at, mask=inside, other=0.0)
    elif HAS_STATES:
        before = (i_sh - H).to(tl.int64) * S * S  # the segment before, same head
        state += tl.load(states + before + at, mask=inside, other=0.0)
    return state


@triton.jit
def inverse_pointers(
    inverse, i_b, t, i_h, stride_b, stride_t, stride_h, tokens, C: tl.constexpr, PACK: tl.constexpr
):
    """Return pointers to rows `tokens` of B = A a, C columns each, in chunks that start at token t.

    A row of memory has PACK rows of B, so that whole lines are written. Except in fp32, C columns
    of leading parts are followed by C columns of low parts.
    """
    WIDTH: tl.constexpr = C if inverse.dtype.element_ty == tl.float32 else 2 * C
    row = tokens // C * C + tokens % C // PACK
    column = tokens % PACK * WIDTH
    start = i_b * stride_b + t * stride_t + i_h * stride_h
    return inverse + start + (row * stride_t + column)[:, None] + tl.arange(0, C)[None, :]


@triton.jit
def load_inverse(p_a, mask, C: tl.constexpr, DTYPE: tl.constexpr):
    """Return the leading and low parts of B; with fp32 the low part is unused."""
    high = tl.load(p_a, mask=mask, other=0.0)
    if DTYPE == tl.float32:
        return high, high
    else:
        return high, tl.load(p_a + C, mask=mask, other=0.0)


@triton.jit
def decayed_inverse(high, low, gamma, DTYPE: tl.constexpr):
    """Return the two parts of B, with each entry multiplied by gamma, its tokens' decay."""
    if DTYPE == tl.float32:
        return high * gamma, low
    else:
        return split((high.to(tl.float32) + low.to(tl.float32)) * gamma, DTYPE)


@triton.jit
def _row_and_column(M):
    # return the row and column of each entry of square matrices [C, C] or [N, C, C]
    index = tl.arange(0, M.shape[-1])
    if len(M.shape) == 3:
        return index[None, :, None], index[None, None, :]
    else:
        return index[:, None], index[None, :]


@triton.jit
def _join_blocks(A, M, HALF: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    # from the inverses of the HALF x HALF diagonal blocks, return those of twice the size
    rows, cols = _row_and_column(M)
    below = (rows // (2 * HALF) == cols // (2 * HALF)) & (rows // HALF > cols // HALF)
    off = tl.where(below, M, 0.0).to(DTYPE)
    a = A.to(DTYPE)
    left = tl.dot(a, off, input_precision=PRECISION).to(DTYPE)
    return A - tl.dot(left, a, input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(M, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + M)^-1 of strictly lower triangular M, fp32.

    M is [C, C], or a batch [N, C, C]; C is 16, 32, 64 or 128. The inverses of the diagonal blocks
    of 2, 4, 8, ... rows are joined by A <- A - A M_off A. A Neumann series costs as much, and its
    powers of M overflow if keys repeat.
    """
    C: tl.constexpr = M.shape[-1]
    rows, cols = _row_and_column(M)
    # the 2 x 2 blocks need no product
    A = tl.where(rows == cols, 1.0, 0.0) - tl.where(rows // 2 == cols // 2, M, 0.0)
    A = _join_blocks(A, M, 2, DTYPE, PRECISION)
    A = _join_blocks(A, M, 4, DTYPE, PRECISION)
    A = _join_blocks(A, M, 8, DTYPE, PRECISION)
    if C >= 32:
        A = _join_blocks(A, M, 16, DTYPE, PRECISION)
    if C >= 64:
        A = _join_blocks(A, M, 32, DTYPE, PRECISION)
    if C >= 128:
        A = _join_blocks(A, M, 64, DTYPE, PRECISION)
    return A


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
