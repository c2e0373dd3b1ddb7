"""The Triton kernels of SSD's forward pass: segment sums, and the outputs.

x and y are `[B, T, H, P]`, b and c (B and C of the definition) `[B, T, G, N]`. x, b and c each have
a separate stride between tokens, so that all may be columns of one projection. dt is `[B, T, H]`
fp32 contiguous, a (A) and d (D) `[H]` fp32. fla.ops.quasar.segments makes the tables of segments.
States of the caller are `[N, H, K, V]`, those between the kernels are transposed, `[.., V, K]`, so
that an accumulator is the left operand of the next product. K is the state size, V a head's
channels, BK and BV are the columns of tiles, C the tokens of a chunk. Products have bf16 operands
for bf16 inputs, otherwise fp32 operands with `PRECISION`.

A head's decay is one number per token, so the score of tokens i and j contains the exponential of
the sum of log decays between them, which is at most 1. No decay can overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fla.ops.quasar.triton_kernels.device_functions import (
    decays_between,
    load_segment,
    log_decays_after,
)


@triton.jit
def load_tokens(x, first, rows, left, columns, STRIDE, start, WIDTH: tl.constexpr):
    """Load rows `[rows, columns]` of one head in x's dtype; its first column is `start`.

    `first` is the index of row 0 among all tokens; rows from `left` on are zeros.
    """
    mask = (rows < left)[:, None] & (columns < WIDTH)[None, :]
    place = x + (first + rows)[:, None].to(tl.int64) * STRIDE + (start + columns)[None, :]
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def load_steps(dt, rate, first, rows, left, i_h, H: tl.constexpr):
    """Return step sizes and log decays `[C]` of one head; zeros from row `left` on.

    Log decays are clamped to a value with an exponential of 0 in fp32, because sums of -inf would
    give NaN.
    """
    step = tl.load(dt + (first + rows) * H + i_h, mask=rows < left, other=0.0)
    return step, tl.maximum(step * rate, -104.0)


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def segment_sum_kernel(
    x, y, dt, a, table, sums, decays,
    X_STRIDE, Y_STRIDE,
    T, NS, SEG,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, REVERSE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute the addition of one segment and head to the state, `[V, K]`, and its log decays' sum.

    Without REVERSE, x = b, y = x, and the state is that after the segment. With REVERSE, x = c,
    y = dy, and the result belongs to the state's gradient before the segment. The sum is written
    for each channel of the keys, as segment_scan_kernel reads it. Grid: (segments * H, V / BV).
    """
    i_sh, i_h = tl.program_id(0), tl.program_id(0) % H
    i_b, _, t0, length, is_first, is_last = load_segment(table, i_sh // H, T, NS, SEG, IS_VARLEN)
    if REVERSE:
        unused = is_first
    else:
        unused = is_last
    if unused:
        return  # no other segment of the sequence reads it
    DTYPE: tl.constexpr = tl.bfloat16 if y.dtype.element_ty == tl.bfloat16 else tl.float32
    rows = tl.arange(0, C)
    c_k = tl.arange(0, BK)
    c_v = tl.program_id(1) * BV + tl.arange(0, BV)
    rate = tl.load(a + i_h)
    state = tl.zeros([BV, BK], dtype=tl.float32)
    decay = 0.0
    n = tl.cdiv(length, C)
    for i in range(n):
        if REVERSE:
            begin = (n - 1 - i) * C
        else:
            begin = i * C
        left = length - begin
        first = i_b * T + t0 + begin
        b_x = load_tokens(x, first, rows, left, c_k, X_STRIDE, (i_h // (H // G)) * K, K)
        b_y = load_tokens(y, first, rows, left, c_v, Y_STRIDE, i_h * V, V).to(DTYPE)
        step, log_decay = load_steps(dt, rate, first, rows, left, i_h, H)
        whole = tl.sum(log_decay, 0)
        if REVERSE:
            factor = tl.exp(tl.cumsum(log_decay, 0))
        else:
            since = tl.cumsum(log_decay, 0)
            factor = step * tl.exp(log_decays_after(log_decay, since, whole, DTYPE))
        b_x = (b_x.to(tl.float32) * factor[:, None]).to(DTYPE)
        state = tl.dot(tl.trans(b_y), b_x, acc=state * tl.exp(whole), input_precision=PRECISION)
        decay += whole
    inside = (c_v < V)[:, None] & (c_k < K)[None, :]
    place = i_sh.to(tl.int64) * K * V + c_v[:, None] * K + c_k[None, :]
    tl.store(sums + place, state, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(decays + i_sh * K + c_k, tl.zeros([BK], tl.float32) + decay, mask=c_k < K)


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def output_kernel(
    x, dt, a, b, c, d, y, states, initial_state, final_state, checkpoints, table,
    X_STRIDE, B_STRIDE, C_STRIDE,
    T, NS, SEG,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one segment and head, chunk by chunk, and the final state.

    `states` are those after the segments, or None for one segment per sequence. `checkpoints`, if
    not None, receive the state before each chunk, `[V, K]`. The place of chunk n of segment s is
    t / C + s + n, with the segment's first token t. `d` may be None. Grid: (segments * H, V / BV).
    """
    i_sh, i_h = tl.program_id(0), tl.program_id(0) % H
    i_s, i_g = i_sh // H, i_h // (H // G)
    i_b, i_n, t0, length, is_first, is_last = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    DTYPE: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.bfloat16 else tl.float32
    rows = tl.arange(0, C)
    c_k = tl.arange(0, BK)
    c_v = tl.program_id(1) * BV + tl.arange(0, BV)
    of_state = (c_v < V)[:, None] & (c_k < K)[None, :]
    given = (i_n * H + i_h).to(tl.int64) * K * V + c_k[None, :] * V + c_v[:, None]
    between = c_v[:, None] * K + c_k[None, :]
    state = tl.zeros([BV, BK], dtype=tl.float32)
    if is_first:
        if initial_state is not None:
            state += tl.load(initial_state + given, mask=of_state, other=0.0)
    elif states is not None:
        before = (i_sh - H).to(tl.int64) * K * V
        state += tl.load(states + before + between, mask=of_state, other=0.0)
    rate = tl.load(a + i_h)
    cell = (i_b * T + t0) // C + i_s
    for i in range(tl.cdiv(length, C)):
        left = length - i * C
        first = i_b * T + t0 + i * C
        b_x = load_tokens(x, first, rows, left, c_v, X_STRIDE, i_h * V, V)
        b_b = load_tokens(b, first, rows, left, c_k, B_STRIDE, i_g * K, K).to(DTYPE)
        b_c = load_tokens(c, first, rows, left, c_k, C_STRIDE, i_g * K, K).to(DTYPE)
        step, log_decay = load_steps(dt, rate, first, rows, left, i_h, H)
        if checkpoints is not None:
            kept = checkpoints + ((cell + i) * H + i_h).to(tl.int64) * K * V + between
            tl.store(kept, state.to(checkpoints.dtype.element_ty), mask=of_state)
        sums = tl.cumsum(log_decay, 0)
        whole = tl.sum(log_decay, 0)
        values = tl.trans(b_x.to(DTYPE))
        scores = tl.dot(b_c, tl.trans(b_b), input_precision=PRECISION)
        scores *= decays_between(log_decay, sums, DTYPE) * step[None, :]
        scores = tl.where(rows[:, None] >= rows[None, :], scores, 0.0).to(DTYPE)
        out = tl.dot(state.to(DTYPE), tl.trans(b_c), input_precision=PRECISION)
        out *= tl.exp(sums)[None, :]
        out = tl.dot(values, tl.trans(scores), acc=out, input_precision=PRECISION)
        after = tl.minimum(log_decays_after(log_decay, sums, whole, DTYPE), 0.0)
        behind = step * tl.exp(after)
        writing = (b_b.to(tl.float32) * behind[:, None]).to(DTYPE)
        state = tl.dot(values, writing, acc=state * tl.exp(whole), input_precision=PRECISION)
        out = tl.trans(out)
        if d is not None:
            out += tl.load(d + i_h) * b_x.to(tl.float32)
        mask = (rows < left)[:, None] & (c_v < V)[None, :]
        place = y + ((first + rows)[:, None].to(tl.int64) * H + i_h) * V + c_v[None, :]
        tl.store(place, out.to(y.dtype.element_ty), mask=mask)
    if is_last:
        tl.store(final_state + given, state, mask=of_state)


@triton.jit
def step_kernel(
    x, dt, a, b, c, d, y, initial_state, final_state,
    X_STRIDE, B_STRIDE, C_STRIDE,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Compute the output and the next state of one sequence and head for BV columns of the values.

    The layouts are those of `output_kernel` for one token; `initial_state` and `d` may be None. All
    arithmetic is fp32. Grid: (B * H, V / BV).
    """
    i_nh = tl.program_id(0).to(tl.int64)
    i_n, i_h = i_nh // H, i_nh % H
    c_k = tl.arange(0, BK)
    c_v = tl.program_id(1) * BV + tl.arange(0, BV)
    in_k, in_v = c_k < K, c_v < V
    place = i_nh * K * V + c_k[:, None] * V + c_v[None, :]
    mask = in_k[:, None] & in_v[None, :]
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if initial_state is not None:
        state = tl.load(initial_state + place, mask=mask, other=0.0)
    group = i_h // (H // G) * K
    b_b = tl.load(b + i_n * B_STRIDE + group + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_c = tl.load(c + i_n * C_STRIDE + group + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_x = tl.load(x + i_n * X_STRIDE + i_h * V + c_v, mask=in_v, other=0.0).to(tl.float32)
    step = tl.load(dt + i_nh)
    state = tl.exp(step * tl.load(a + i_h)) * state + (step * b_b)[:, None] * b_x[None, :]
    out = tl.sum(b_c[:, None] * state, 0)
    if d is not None:
        out += tl.load(d + i_h) * b_x
    tl.store(y + i_nh * V + c_v, out.to(y.dtype.element_ty), mask=in_v)
    tl.store(final_state + place, state, mask=mask)
