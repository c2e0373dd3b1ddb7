"""The Triton kernels of WKV6's forward pass: segment sums, and the outputs.

r, k and w are `[B, T, H, K]` contiguous, v and o `[B, T, H, V]`; tables of segments are those of
fla.ops.quasar.segments. States of the caller are `[N, H, K, V]`, those between the kernels
are transposed, `[.., V, K]`, so that an accumulator is the left operand of the next product. BK and
BV are the columns of tiles, C the tokens of a chunk. Products have bf16 operands for bf16 inputs,
otherwise fp32 operands with `PRECISION`, because fp16 cannot represent factors of up to exp(LIMIT).
"""

from __future__ import annotations

import triton
import triton.language as tl
from fla.ops.quasar.triton_kernels.device_functions import load_segment

from quasar_kernels.blocks.triton_segments.kernels import load_rows, row_pointers
from quasar_kernels.blocks.wkv6_triton.factors import (
    after,
    exponents,
    load_log_decays,
    strong_scores,
    until,
)


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def segment_sum_kernel(
    x, y, w, table, sums, decays, T, NS, SEG,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, REVERSE: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute the addition of one segment and head to the state, `[V, K]`, and its log decays' sum.

    Without REVERSE, x = k, y = v, and the state is that after the segment. With REVERSE, x = r,
    y = do, and the result belongs to the state's gradient before the segment.
    Grid: (segments * H, V / BV).
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
    state = tl.zeros([BV, BK], dtype=tl.float32)
    decay = tl.zeros([BK], dtype=tl.float32)
    n = tl.cdiv(length, C)
    for i in range(n):
        if REVERSE:
            first = (n - 1 - i) * C
        else:
            first = i * C
        left = length - first
        at = (i_b * T + t0 + first) * H + i_h
        b_x = load_rows(x, at, rows, left, c_k, H, K)
        b_y = load_rows(y, at, rows, left, c_v, H, V)
        b_w = load_log_decays(w, at, rows, left, c_k, H, K)
        if REVERSE:
            b_x = b_x.to(tl.float32) * tl.exp(until(b_w))
        else:
            b_x = b_x.to(tl.float32) * tl.exp(after(b_w))
        whole = tl.sum(b_w, 0)
        state = state * tl.exp(whole)[None, :]
        state = tl.dot(tl.trans(b_y.to(DTYPE)), b_x.to(DTYPE), acc=state, input_precision=PRECISION)
        decay += whole
    inside = (c_v < V)[:, None] & (c_k < K)[None, :]
    place = i_sh.to(tl.int64) * K * V + c_v[:, None] * K + c_k[None, :]
    tl.store(sums + place, state, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(decays + i_sh * K + c_k, decay, mask=c_k < K)


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def output_kernel(
    r, k, v, w, u, o, states, initial_state, final_state, checkpoints, table, T, NS, SEG,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one segment and head, chunk by chunk, and the final state.

    `states` are those after the segments, or None for one segment per sequence. `checkpoints`, if
    not None, receive the state before each chunk, `[V, K]`. The place of chunk n of segment s is
    t / C + s + n, with the segment's first token t. Grid: (segments * H, V / BV).
    """
    i_sh, i_h = tl.program_id(0), tl.program_id(0) % H
    i_s = i_sh // H
    i_b, i_n, t0, length, is_first, is_last = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    DTYPE: tl.constexpr = tl.bfloat16 if v.dtype.element_ty == tl.bfloat16 else tl.float32
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
    b_u = tl.load(u + i_h * K + c_k, mask=c_k < K, other=0.0).to(tl.float32)
    cell = (i_b * T + t0) // C + i_s
    for i in range(tl.cdiv(length, C)):
        left = length - i * C
        at = (i_b * T + t0 + i * C) * H + i_h
        b_r = load_rows(r, at, rows, left, c_k, H, K).to(tl.float32)
        b_k = load_rows(k, at, rows, left, c_k, H, K).to(tl.float32)
        b_v = load_rows(v, at, rows, left, c_v, H, V).to(DTYPE)
        b_w = load_log_decays(w, at, rows, left, c_k, H, K)
        if checkpoints is not None:
            kept = checkpoints + ((cell + i) * H + i_h).to(tl.int64) * K * V + between
            tl.store(kept, state.to(checkpoints.dtype.element_ty), mask=of_state)
        of_r, of_k, start, end, whole, strong = exponents(b_w)
        reading = (b_r * tl.exp(of_r)).to(DTYPE)
        writing = (b_k * tl.exp(of_k)).to(DTYPE)
        if strong:
            scores = strong_scores(b_r, b_k, b_w)
        else:
            scores = tl.dot(reading, tl.trans(writing), input_precision=PRECISION)
        itself = tl.sum(b_r * b_u[None, :] * b_k, 1)
        scores = tl.where(rows[:, None] > rows[None, :], scores, 0.0)
        scores += tl.where(rows[:, None] == rows[None, :], itself[:, None], 0.0)
        entered = (state * tl.exp(start)[None, :]).to(DTYPE)
        values = tl.trans(b_v)
        out = tl.dot(entered, tl.trans(reading), input_precision=PRECISION)
        out = tl.dot(values, tl.trans(scores.to(DTYPE)), acc=out, input_precision=PRECISION)
        added = tl.dot(values, writing, input_precision=PRECISION)
        state = state * tl.exp(whole)[None, :] + added * tl.exp(end)[None, :]
        mask = (rows < left)[:, None] & (c_v < V)[None, :]
        place = row_pointers(o, at, rows, c_v, H, V)
        tl.store(place, tl.trans(out).to(o.dtype.element_ty), mask=mask)
    if is_last:
        tl.store(final_state + given, state, mask=of_state)


@triton.jit
def step_kernel(
    r, k, v, w, u, o, initial_state, final_state,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute the output and the next state of one sequence and head for BV columns of the values.

    r, k and w are `[B, 1, H, K]`, v and o `[B, 1, H, V]`, states `[B, H, K, V]`; `initial_state`
    may be None. All arithmetic is fp32. Grid: (B * H, cdiv(V, BV)).
    """
    i_nh = tl.program_id(0).to(tl.int64)
    c_k = tl.arange(0, BK)
    c_v = tl.program_id(1) * BV + tl.arange(0, BV)
    in_k, in_v = c_k < K, c_v < V
    place = i_nh * K * V + c_k[:, None] * V + c_v[None, :]
    mask = in_k[:, None] & in_v[None, :]
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if initial_state is not None:
        state = tl.load(initial_state + place, mask=mask, other=0.0)
    b_r = tl.load(r + i_nh * K + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_k = tl.load(k + i_nh * K + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_w = tl.load(w + i_nh * K + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_u = tl.load(u + i_nh % H * K + c_k, mask=in_k, other=0.0).to(tl.float32)
    b_v = tl.load(v + i_nh * V + c_v, mask=in_v, other=0.0).to(tl.float32)
    out = tl.sum(b_r[:, None] * state, 0) + tl.sum(b_r * b_u * b_k) * b_v
    tl.store(o + i_nh * V + c_v, out.to(o.dtype.element_ty), mask=in_v)
    state = tl.exp(b_w)[:, None] * state + b_k[:, None] * b_v[None, :]
    tl.store(final_state + place, state, mask=mask)
