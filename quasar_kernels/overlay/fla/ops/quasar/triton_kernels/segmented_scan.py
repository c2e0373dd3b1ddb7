"""The Triton kernels of the segmented scan: segment maps, their scan, and the outputs.

A state is `[S, S]`, key dimension first, fp32. BS is S padded to a power of two. q, k, v and o may
have any batch, token and head strides (last stride 1). chunk_intra_token_parallel.py computes
B = A a of each chunk. README.md in the parent folder has the algebra.

The products are arranged so that each result is the next one's left operand: an accumulator
becomes a left operand in registers, but a right operand only through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.quasar.triton_kernels.device_functions import (
    decayed_inverse,
    decays_between,
    dot_split,
    inverse_pointers,
    load_entering_state,
    load_inverse,
    load_segment,
    log_decays_after,
    operand,
    row_pointers,
    split,
    token_pointers,
)


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def segment_map_kernel(
    k, v, g, inverse, table, G_out, R_out, T, NS, SEG,
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ab, stride_at, stride_ah,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, C: tl.constexpr,
    PACK: tl.constexpr, PRECISION: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute rows of G and R of one segment and head, from the segment's last chunk to its first.

    Starting from G = I, each chunk gives Z = G K^T, Y = Z B, R += Y V, G -= Y K: four products, and
    rows of G are independent. The kernel keeps E = I - G, which enters its product as the sum of
    two operands, because Z is a small difference if keys repeat. Grid: (segments * H, S / BR).
    A decay is a factor of the whole state, so it commutes with the rest. With g, the log decays
    [B, T, H] fp32, G is scaled at the end, and in the product with V, Y is scaled by the decay
    after each token.
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_b, _, t0, length, _, is_last = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    if is_last:
        return  # the state after a sequence's last segment enters no segment
    rows = tl.arange(0, C)
    cols = tl.arange(0, BS)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    DTYPE: tl.constexpr = k.dtype.element_ty

    n_chunks = tl.cdiv(length, C)
    left = length - (n_chunks - 1) * C  # tokens of the current chunk; the following ones are full
    t = t0 + (n_chunks - 1).to(tl.int64) * C
    p_k = row_pointers(k, i_b, t, i_h, stride_kb, stride_kt, stride_kh, rows, cols)
    p_kr = row_pointers(k, i_b, t, i_h, stride_kb, stride_kt, stride_kh, rows, r)
    p_v = row_pointers(v, i_b, t, i_h, stride_vb, stride_vt, stride_vh, rows, cols)
    p_a = inverse_pointers(inverse, i_b, t, i_h, stride_ab, stride_at, stride_ah, rows, C, PACK)
    E = tl.zeros([BR, BS], dtype=tl.float32)
    R = tl.zeros([BR, BS], dtype=tl.float32)
    if g is not None:
        p_g = token_pointers(g, i_b, t, i_h, T, H, rows)
        later = tl.sum(tl.zeros([C], dtype=tl.float32), axis=0)  # log decay after the chunk
    for _ in range(0, n_chunks):
        tokens = (rows < left)[:, None]
        mask = tokens & (cols < S)[None, :]
        b_k = tl.load(p_k, mask=mask, other=0.0)
        b_v = tl.load(p_v, mask=mask, other=0.0)
        if BR == BS:
            b_kr = b_k
        else:
            b_kr = tl.load(p_kr, mask=tokens & (r < S)[None, :], other=0.0)
        a_high, a_low = load_inverse(p_a, tokens, C, DTYPE)
        if DTYPE == tl.float32:
            Z = tl.dot(E, tl.trans(b_k), input_precision=PRECISION)
        else:
            e_high, e_low = split(E, DTYPE)
            Z = tl.dot(e_high, tl.trans(b_k))
            Z = tl.dot(e_low, tl.trans(b_k), acc=Z)
        Z = tl.trans(b_kr).to(tl.float32) - Z
        Y, _ = dot_split(Z, a_high, a_low, DTYPE, PRECISION)
        if g is not None:
            b_g = tl.load(p_g, mask=rows < left, other=0.0)
            whole = tl.sum(b_g, axis=0)
            after = later + log_decays_after(b_g, tl.cumsum(b_g, axis=0), whole, DTYPE)
            Yv = operand(Y * tl.exp(after)[None, :], DTYPE)
            later += whole
            p_g -= C * H
        Y = operand(Y, DTYPE)
        if g is None:
            Yv = Y
        R = tl.dot(Yv, b_v, acc=R, input_precision=PRECISION)
        E = tl.dot(Y, b_k, acc=E, input_precision=PRECISION)
        left = C
        p_k -= C * stride_kt
        p_kr -= C * stride_kt
        p_v -= C * stride_vt
        p_a -= C * stride_at

    out = (tl.program_id(0).to(tl.int64) * S * S) + r[:, None] * S + cols[None, :]
    inside = (r < S)[:, None] & (cols < S)[None, :]
    G = tl.where(r[:, None] == cols[None, :], 1.0, 0.0) - E
    if g is not None:
        G *= tl.exp(later)
    tl.store(G_out + out, G, mask=inside)
    tl.store(R_out + out, R, mask=inside)


@triton.jit(do_not_specialize=["NS"])
def segment_scan_kernel(
    G, R, initial_state, first, NS,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr, EXACT: tl.constexpr,
    BACKWARD: tl.constexpr, HAS_INITIAL: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Replace the maps of a sequence's segments by states: R[n] becomes the state after segment n.

    BACKWARD scans the state's gradient from the last segment to the first, with G^T: R[n] becomes
    dS before segment n; R of the last segment already is that. The scanned matrix is transposed, in
    fp32. Its product with G has three terms, with tf32 operands if EXACT, otherwise bf16.
    Grid: (sequences * H, S / BV); a program computes BV value columns of a head.
    """
    i_n, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    if IS_VARLEN:
        s0 = tl.load(first + i_n)
        s1 = tl.load(first + i_n + 1)
    else:
        s0 = i_n.to(tl.int64) * NS
        s1 = s0 + NS
    cols = tl.arange(0, BS)
    rows = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = (rows < S)[:, None] & (cols < S)[None, :]
    square = (cols < S)[:, None] & (cols < S)[None, :]
    at = cols[None, :] * S + rows[:, None]
    state = tl.zeros([BV, BS], dtype=tl.float32)
    steps = (s1 - s0 - 1).to(tl.int32)
    i_s = s0
    STEP: tl.constexpr = -H * S * S if BACKWARD else H * S * S
    if BACKWARD:
        several = steps > 0
        last = ((s1 - 1) * H + i_h) * S * S
        state += tl.load(R + last + at, mask=inside & several, other=0.0)
        steps -= 1
        i_s = s1 - 2
    if HAS_INITIAL:
        own = tl.program_id(0).to(tl.int64) * S * S
        state += tl.load(initial_state + own + at, mask=inside, other=0.0)
    # the pointers of G as a right operand: transposed in the forward pass
    i, j = (cols[:, None], cols[None, :]) if BACKWARD else (cols[None, :], cols[:, None])
    p_G = G + (i_s * H + i_h) * S * S + i * S + j
    p_R = R + (i_s * H + i_h) * S * S + at
    if EXACT:
        for _ in range(0, steps):
            b_G = tl.load(p_G, mask=square, other=0.0)
            b_R = tl.load(p_R, mask=inside, other=0.0)
            state = tl.dot(state, b_G, acc=b_R, input_precision="tf32x3")
            tl.store(p_R, state, mask=inside)
            p_G += STEP
            p_R += STEP
    else:
        # the steps are sequential, so the next map is loaded one step ahead
        b_G = tl.load(p_G, mask=square & (steps > 0), other=0.0)
        b_R = tl.load(p_R, mask=inside & (steps > 0), other=0.0)
        for n in range(1, steps + 1):
            p_G += STEP
            next_G = tl.load(p_G, mask=square & (n < steps), other=0.0)
            next_R = tl.load(p_R + STEP, mask=inside & (n < steps), other=0.0)
            g_high, g_low = split(b_G, tl.bfloat16)
            product, _ = dot_split(state, g_high, g_low, tl.bfloat16, "tf32")
            state = product + b_R
            tl.store(p_R, state, mask=inside)
            p_R += STEP
            b_G = next_G
            b_R = next_R


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def segment_output_kernel(
    q, k, v, g, inverse, table, states, initial_state, final_state, o, checkpoints, T, NS, SEG,
    scale,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh, stride_ob, stride_ot, stride_oh,
    stride_ab, stride_at, stride_ah,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACK: tl.constexpr, PRECISION: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_STATES: tl.constexpr, STORE_FINAL: tl.constexpr, STORE_FRESH: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Process one segment of one head from its entering state; write o (and the final state).

    For each chunk: V' = B (V - K S), O = Q S + tril(Q K^T) V', S += K^T V', all transposed. Only q,
    k, v, B and o are read from or written to device memory. B may be stored in o's rows.
    With STORE_FRESH the kernel writes V' instead of o, for the backward pass, and does not read q.
    With g, the log decays [B, T, H] fp32, B and tril(Q K^T) are multiplied entry by entry by Gamma,
    the decay between their tokens. `checkpoints`, in o's layout, then receives the state after
    every KEEP tokens, in the rows of the first S of these. Grid: (segments * H, S / BV).
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_b, i_n, t0, length, is_first, is_last = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    rows = tl.arange(0, C)
    cols = tl.arange(0, BS)
    v_cols = tl.program_id(1) * BV + tl.arange(0, BV)
    DTYPE: tl.constexpr = k.dtype.element_ty
    p_q = row_pointers(q, i_b, t0, i_h, stride_qb, stride_qt, stride_qh, rows, cols)
    p_k = row_pointers(k, i_b, t0, i_h, stride_kb, stride_kt, stride_kh, rows, cols)
    p_v = row_pointers(v, i_b, t0, i_h, stride_vb, stride_vt, stride_vh, rows, v_cols)
    p_o = row_pointers(o, i_b, t0, i_h, stride_ob, stride_ot, stride_oh, rows, v_cols)
    p_a = inverse_pointers(inverse, i_b, t0, i_h, stride_ab, stride_at, stride_ah, rows, C, PACK)

    inside = (v_cols < S)[:, None] & (cols < S)[None, :]
    at = cols[None, :] * S + v_cols[:, None]
    own = (i_n * H + i_h) * S * S  # this sequence's place in [N, H, S, S]
    state = load_entering_state(
        initial_state, states, tl.program_id(0), own, at, inside, is_first, BV, BS, S, H,
        HAS_INITIAL, HAS_STATES,
    )  # fmt: skip

    if g is not None:
        p_g = token_pointers(g, i_b, t0, i_h, T, H, rows)
    if checkpoints is not None:
        KEEP: tl.constexpr = max(BS, C)
        p_c = row_pointers(checkpoints, i_b, t0, i_h, stride_ob, stride_ot, stride_oh, v_cols, cols)
    left = length
    for _ in range(0, tl.cdiv(length, C)):
        tokens = (rows < left)[:, None]
        mask = tokens & (cols < S)[None, :]
        v_mask = tokens & (v_cols < S)[None, :]
        b_k = tl.load(p_k, mask=mask, other=0.0)
        b_v = tl.load(p_v, mask=v_mask, other=0.0)
        a_high, a_low = load_inverse(p_a, tokens, C, DTYPE)
        b_s = operand(state, DTYPE)
        D = tl.trans(b_v).to(tl.float32)
        if g is None:
            D -= tl.dot(b_s, tl.trans(b_k), input_precision=PRECISION)
        else:
            b_g = tl.load(p_g, mask=rows < left, other=0.0)
            since = tl.cumsum(b_g, axis=0)  # log decays since the chunk's begin
            whole = tl.sum(b_g, axis=0)
            gamma = decays_between(b_g, since, DTYPE)
            a_high, a_low = decayed_inverse(a_high, a_low, gamma, DTYPE)
            read = tl.dot(b_s, tl.trans(b_k), input_precision=PRECISION)
            D -= read * tl.exp(since)[None, :]
            p_g += C * H
        V, _ = dot_split(D, tl.trans(a_high), tl.trans(a_low), DTYPE, PRECISION)
        if STORE_FRESH:
            V = operand(V, DTYPE)
            tl.store(p_o, tl.trans(V), mask=v_mask)
        else:
            b_q = tl.load(p_q, mask=mask, other=0.0)
            P = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
            P = tl.where(rows[:, None] <= rows[None, :], P, 0.0)
            if g is None:
                p_high, p_low = split(P, DTYPE)
                O, V = dot_split(V, p_high, p_low, DTYPE, PRECISION)
                O = tl.dot(b_s, tl.trans(b_q), acc=O, input_precision=PRECISION)
            else:
                p_high, p_low = split(P * tl.trans(gamma), DTYPE)
                O, _ = dot_split(V, p_high, p_low, DTYPE, PRECISION)
                read = tl.dot(b_s, tl.trans(b_q), input_precision=PRECISION)
                O += read * tl.exp(since)[None, :]
            tl.store(p_o, tl.trans(O * scale).to(o.dtype.element_ty), mask=v_mask)
            p_q += C * stride_qt
        if g is not None:
            after = log_decays_after(b_g, since, whole, DTYPE)
            V = operand(V.to(tl.float32) * tl.exp(after)[None, :], DTYPE)
            state *= tl.exp(whole)
        state = tl.dot(V, b_k, acc=state, input_precision=PRECISION)
        left -= C
        if checkpoints is not None:
            if (length - left) % KEEP == 0 and left > 0:
                kept = operand(state, checkpoints.dtype.element_ty)
                tl.store(p_c + (length - left - KEEP).to(tl.int64) * stride_ot, kept, mask=inside)
        p_k += C * stride_kt
        p_v += C * stride_vt
        p_a += C * stride_at
        p_o += C * stride_ot

    if STORE_FINAL:
        if is_last:
            tl.store(final_state + own + at, state, mask=inside)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
