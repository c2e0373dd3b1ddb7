"""The Triton kernel of SSD's backward pass: the gradients of a segment, from its last chunk on.

The state's gradient has the same recurrence as the state, in reverse order, so both use
segment_sum_kernel and segment_scan_kernel. The layouts are those of forward.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fla.ops.quasar.triton_kernels.device_functions import (
    decays_between,
    load_segment,
    log_decays_after,
)

from quasar_kernels.blocks.ssd_triton.forward import load_steps, load_tokens


@triton.jit(do_not_specialize=["TOTAL", "SEGMENTS", "T", "NS", "SEG"])
def gradient_kernel(
    x, dt, a, b, c, d, dy, dx, d_dt, da, db, dc, dd, states, d_final, d_initial, checkpoints, table,
    X_STRIDE, B_STRIDE, C_STRIDE,
    TOTAL, SEGMENTS, T, NS, SEG,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one segment and head from BV columns of the values.

    dy is contiguous. The gradients of b and c are sums over heads and all columns, that of dt is a
    sum over all columns. Each program writes its part of a sum: `[V / BV, B, T, H, K]` for b and c,
    `[V / BV, B, T, H]` for dt. The gradients of a and d also have a part per segment,
    `[V / BV, segments, H]`. `states` are the gradients of the states before the segments, or None
    if each sequence is one segment. `d_final`, the final state's gradient, may be None, as may d
    and dd. TOTAL is B * T, SEGMENTS is the total number of segments. Grid: (segments * H, V / BV).

    The gradient of a token's log decay is a sum over pairs of tokens: one before this token, and
    this token or one after it.
    """
    i_sh, i_h = tl.program_id(0), tl.program_id(0) % H
    i_s, i_v, i_g = i_sh // H, tl.program_id(1), i_h // (H // G)
    i_b, i_n, t0, length, is_first, is_last = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    DTYPE: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.bfloat16 else tl.float32
    rows = tl.arange(0, C)
    c_k = tl.arange(0, BK)
    c_v = i_v * BV + tl.arange(0, BV)
    of_state = (c_v < V)[:, None] & (c_k < K)[None, :]
    given = (i_n * H + i_h).to(tl.int64) * K * V + c_k[None, :] * V + c_v[:, None]
    between = c_v[:, None] * K + c_k[None, :]
    d_state = tl.zeros([BV, BK], dtype=tl.float32)
    if is_last:
        if d_final is not None:
            d_state += tl.load(d_final + given, mask=of_state, other=0.0)
    elif states is not None:
        behind = (i_sh + H).to(tl.int64) * K * V
        d_state += tl.load(states + behind + between, mask=of_state, other=0.0)
    rate = tl.load(a + i_h)
    d_rate = 0.0
    d_skip = 0.0
    cell = (i_b * T + t0) // C + i_s
    share = i_v.to(tl.int64) * TOTAL
    n = tl.cdiv(length, C)
    for m in range(n):
        i = n - 1 - m
        left = length - i * C
        first = i_b * T + t0 + i * C
        b_x = load_tokens(x, first, rows, left, c_v, X_STRIDE, i_h * V, V).to(DTYPE)
        b_dy = load_tokens(dy, first, rows, left, c_v, H * V, i_h * V, V).to(DTYPE)
        b_b = load_tokens(b, first, rows, left, c_k, B_STRIDE, i_g * K, K).to(DTYPE)
        b_c = load_tokens(c, first, rows, left, c_k, C_STRIDE, i_g * K, K).to(DTYPE)
        step, log_decay = load_steps(dt, rate, first, rows, left, i_h, H)
        kept = checkpoints + ((cell + i) * H + i_h).to(tl.int64) * K * V + between
        state = tl.load(kept, mask=of_state, other=0.0)

        sums = tl.cumsum(log_decay, 0)
        whole = tl.sum(log_decay, 0)
        until = tl.exp(sums)
        after = tl.exp(tl.minimum(log_decays_after(log_decay, sums, whole, DTYPE), 0.0))
        decay = decays_between(log_decay, sums, DTYPE)
        decay = tl.where(rows[:, None] >= rows[None, :], decay, 0.0)
        scores = tl.dot(b_c, tl.trans(b_b), input_precision=PRECISION) * decay
        d_scores = tl.dot(b_dy, tl.trans(b_x), input_precision=PRECISION)
        pairs = scores * d_scores
        d_step = tl.sum(pairs, 0)
        pairs = tl.where(rows[:, None] > rows[None, :], pairs * step[None, :], 0.0)
        scores = (scores * step[None, :]).to(DTYPE)
        d_scores = (d_scores * decay * step[None, :]).to(DTYPE)

        leaving = d_state.to(DTYPE)
        writing = (b_b.to(tl.float32) * (step * after)[:, None]).to(DTYPE)
        b_dx = tl.dot(writing, tl.trans(leaving), input_precision=PRECISION)
        b_dx = tl.dot(tl.trans(scores), b_dy, acc=b_dx, input_precision=PRECISION)
        if d is not None:
            wide = b_dy.to(tl.float32)
            b_dx += tl.load(d + i_h) * wide
            d_skip += tl.sum(wide * b_x.to(tl.float32))
        mask_v = (rows < left)[:, None] & (c_v < V)[None, :]
        token = (first + rows).to(tl.int64)
        place = (token[:, None] * H + i_h) * V + c_v[None, :]
        tl.store(dx + place, b_dx.to(dx.dtype.element_ty), mask=mask_v)

        b_dc = tl.dot(b_dy, state.to(DTYPE), input_precision=PRECISION) * until[:, None]
        read = tl.sum(b_dc * b_c.to(tl.float32), 1)
        b_db = tl.dot(b_x, leaving, input_precision=PRECISION) * after[:, None]
        wrote = tl.sum(b_db * b_b.to(tl.float32), 1)
        d_step += wrote
        wrote *= step
        b_dc = tl.dot(d_scores, b_b, acc=b_dc, input_precision=PRECISION)
        b_db = tl.dot(tl.trans(d_scores), b_c, acc=b_db * step[:, None], input_precision=PRECISION)
        mask_k = (rows < left)[:, None] & (c_k < K)[None, :]
        place = ((share + token)[:, None] * H + i_h) * K + c_k[None, :]
        tl.store(dc + place, b_dc.to(dc.dtype.element_ty), mask=mask_k)
        tl.store(db + place, b_db.to(db.dtype.element_ty), mask=mask_k)

        through = tl.exp(whole) * tl.sum(state.to(tl.float32) * d_state)
        within = tl.sum(pairs, 1) - tl.sum(pairs, 0) + read
        d_decay = tl.cumsum(within, 0, reverse=True) + tl.cumsum(wrote, 0) - wrote + through
        d_step += rate * d_decay
        d_rate += tl.sum(tl.where(rows < left, step * d_decay, 0.0))
        tl.store(d_dt + (share + token) * H + i_h, d_step, mask=rows < left)

        reading = (b_c.to(tl.float32) * until[:, None]).to(DTYPE)
        d_state = tl.dot(
            tl.trans(b_dy), reading, acc=d_state * tl.exp(whole), input_precision=PRECISION
        )
    if d_initial is not None:
        tl.store(d_initial + given, d_state, mask=of_state & is_first)
    place = (i_v * SEGMENTS + i_s) * H + i_h
    tl.store(da + place, d_rate)
    if d is not None:
        tl.store(dd + place, d_skip)
