"""WKV6's backward pass in Triton: the gradients of a segment, from its last chunk to its first.

The state's gradient has the same recurrence as the state, in reverse order, so both use
segment_sum_kernel and segment_scan_kernel. The layouts are those of forward.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fla.ops.quasar.triton_kernels.device_functions import load_segment

from quasar_kernels.blocks.triton_segments.kernels import load_rows, row_pointers
from quasar_kernels.blocks.wkv6_triton.factors import (
    exponents,
    load_log_decays,
    strong_score_gradients,
    strong_scores,
)


@triton.jit(do_not_specialize=["TOTAL", "T", "NS", "SEG"])
def gradient_kernel(
    r, k, v, w, u, do, dr, dk, dv, dw, du, states, d_final, d_initial, checkpoints, table, TOTAL, T,
    NS, SEG,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one segment and head from BV columns of the values.

    The gradients of r, k and w are sums over all columns; each program of axis 1 writes its part,
    `[V / BV, B, T, H, K]`. u's gradient also has a part per segment, `[V / BV, segments, H, K]`.
    `states` are the gradients of the states before the segments, or None if each sequence is one
    segment; `d_final` is the final state's gradient, or None. TOTAL is B * T.
    Grid: (segments * H, V / BV).

    The gradient of a token's log decay is a sum over pairs of tokens: one before this token and one
    after it. Pairs with one token outside of the chunk are summed directly. The sum over pairs
    within the chunk is a difference: the reads by later tokens minus the writes of this and later
    tokens.
    """
    i_sh, i_h = tl.program_id(0), tl.program_id(0) % H
    i_s, i_v = i_sh // H, tl.program_id(1)
    i_b, i_n, t0, length, is_first, is_last = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    DTYPE: tl.constexpr = tl.bfloat16 if v.dtype.element_ty == tl.bfloat16 else tl.float32
    rows = tl.arange(0, C)
    c_k = tl.arange(0, BK)
    c_v = i_v * BV + tl.arange(0, BV)
    of_state = (c_v < V)[:, None] & (c_k < K)[None, :]
    given = (i_n * H + i_h).to(tl.int64) * K * V + c_k[None, :] * V + c_v[:, None]
    between = c_v[:, None] * K + c_k[None, :]
    later = rows[:, None] > rows[None, :]
    same = rows[:, None] == rows[None, :]
    d_state = tl.zeros([BV, BK], dtype=tl.float32)
    if is_last:
        if d_final is not None:
            d_state += tl.load(d_final + given, mask=of_state, other=0.0)
    elif states is not None:
        behind = (i_sh + H).to(tl.int64) * K * V
        d_state += tl.load(states + behind + between, mask=of_state, other=0.0)
    b_u = tl.load(u + i_h * K + c_k, mask=c_k < K, other=0.0).to(tl.float32)
    d_u = tl.zeros([BK], dtype=tl.float32)
    cell = (i_b * T + t0) // C + i_s
    share = i_v.to(tl.int64) * TOTAL * H
    n = tl.cdiv(length, C)
    for m in range(n):
        i = n - 1 - m
        left = length - i * C
        at = (i_b * T + t0 + i * C) * H + i_h
        b_r = load_rows(r, at, rows, left, c_k, H, K).to(tl.float32)
        b_k = load_rows(k, at, rows, left, c_k, H, K).to(tl.float32)
        b_v = load_rows(v, at, rows, left, c_v, H, V).to(DTYPE)
        b_do = load_rows(do, at, rows, left, c_v, H, V).to(DTYPE)
        b_w = load_log_decays(w, at, rows, left, c_k, H, K)
        kept = checkpoints + ((cell + i) * H + i_h).to(tl.int64) * K * V + between
        state = tl.load(kept, mask=of_state, other=0.0)

        of_r, of_k, start, end, whole, strong = exponents(b_w)
        f_r, f_k = tl.exp(of_r), tl.exp(of_k)
        reading, writing = (b_r * f_r).to(DTYPE), (b_k * f_k).to(DTYPE)
        # a wide product comes first, because Triton uses the first product's warp layout for all
        r_before = tl.dot(b_do, state.to(DTYPE), input_precision=PRECISION)
        d_scores = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        d_scores = tl.where(later, d_scores, 0.0)
        if strong:
            scores = strong_scores(b_r, b_k, b_w)
            r_within, k_within = strong_score_gradients(b_r, b_k, b_w, d_scores)
            read, wrote = b_r * r_within, b_k * k_within
        else:
            scores = tl.dot(reading, tl.trans(writing), input_precision=PRECISION)
            d_operand = d_scores.to(DTYPE)
            r_within = tl.dot(d_operand, writing, input_precision=PRECISION)
            k_within = tl.dot(tl.trans(d_operand), reading, input_precision=PRECISION)
            # from the rounded factors, so that equal terms of `read` and `wrote` cancel
            read = reading.to(tl.float32) * r_within
            wrote = writing.to(tl.float32) * k_within
            r_within = r_within * f_r
            k_within = k_within * f_k
        itself = tl.sum(b_r * b_u[None, :] * b_k, 1)
        scores = tl.where(later, scores, 0.0) + tl.where(same, itself[:, None], 0.0)

        leaving = (d_state * tl.exp(end)[None, :]).to(DTYPE)
        b_dv = tl.dot(tl.trans(scores.to(DTYPE)), b_do, input_precision=PRECISION)
        b_dv = tl.dot(writing, tl.trans(leaving), acc=b_dv, input_precision=PRECISION)
        mask_v = (rows < left)[:, None] & (c_v < V)[None, :]
        place = row_pointers(dv, at, rows, c_v, H, V)
        tl.store(place, b_dv.to(dv.dtype.element_ty), mask=mask_v)

        r_before = r_before * f_r * tl.exp(start)[None, :]
        k_behind = tl.dot(b_v, leaving, input_precision=PRECISION) * f_k
        # the product of a row with itself, in fp32 like its factors
        d_itself = tl.sum(b_do.to(tl.float32) * b_v.to(tl.float32), 1)[:, None]
        b_dr = r_before + r_within
        b_dk = k_behind + k_within
        read += b_r * r_before
        carried = b_k * k_behind
        through = tl.exp(whole) * tl.sum(state.to(tl.float32) * d_state, 0)
        b_dw = tl.cumsum(read - wrote, 0, reverse=True) - read
        b_dw += tl.cumsum(carried, 0) - carried + through[None, :]
        b_dr += d_itself * b_u[None, :] * b_k
        b_dk += d_itself * b_u[None, :] * b_r
        d_u += tl.sum(d_itself * b_r * b_k, 0)
        mask_k = (rows < left)[:, None] & (c_k < K)[None, :]
        p_dr, p_dk, p_dw = (
            row_pointers(dr, share + at, rows, c_k, H, K),
            row_pointers(dk, share + at, rows, c_k, H, K),
            row_pointers(dw, share + at, rows, c_k, H, K),
        )
        tl.store(p_dr, b_dr.to(dr.dtype.element_ty), mask=mask_k)
        tl.store(p_dk, b_dk.to(dk.dtype.element_ty), mask=mask_k)
        tl.store(p_dw, b_dw.to(dw.dtype.element_ty), mask=mask_k)

        added = tl.dot(tl.trans(b_do), reading, input_precision=PRECISION)
        d_state = d_state * tl.exp(whole)[None, :] + added * tl.exp(start)[None, :]
    if d_initial is not None:
        tl.store(d_initial + given, d_state, mask=of_state & is_first)
    shares = tl.num_programs(0).to(tl.int64) // H * i_v + i_s
    tl.store(du + (shares * H + i_h) * K + c_k, d_u, mask=c_k < K)
