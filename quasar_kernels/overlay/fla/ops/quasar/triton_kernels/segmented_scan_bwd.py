"""The Triton kernels of the backward pass, segmented like the forward one.

With V' = A a (V - K S), O = Q S + P V', P = tril(Q K^T) and S_new = S + K^T V', the gradient dS of
the state is computed backward: dV' = P^T dO + K dS_new, dD = A^T dV', dV = a dD and
dS = dS_new + Q^T dO - K^T dV. Its map over a segment is dS_in = G^T dS_out + E with the forward
pass's G, so the same scan kernel computes the gradient between segments. README.md in the parent
folder has the derivation.

With log decays g, each product is multiplied by the decay between its tokens. The gradient of a log
decay sums the contributions of earlier tokens to later ones. It is <S, dS> at the start of a run of
KEEP tokens, where pass 2 stores the state, plus the writes of the run's earlier tokens, minus their
reads. A token reads its own write undecayed. That term is omitted, so the tiny gradients of strong
decays keep their digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.quasar.triton_kernels.device_functions import (
    decayed_inverse,
    decays_between,
    inverse_pointers,
    load_entering_state,
    load_inverse,
    load_segment,
    log_decays_after,
    operand,
    row_pointers,
    token_pointers,
)
from fla.ops.quasar.gate import quasar_step_size, quasar_step_size_bwd


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def segment_state_grad_kernel(
    q, k, g, inverse, fresh, do, table, entering, d_final, E_out, d_initial, dv, dk, checkpoints,
    states, initial_state, begins, T, NS, SEG, scale,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_ob, stride_ot, stride_oh, stride_ab, stride_at, stride_ah,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, PACK: tl.constexpr,
    PRECISION: tl.constexpr, MAP_ONLY: tl.constexpr, HAS_FINAL: tl.constexpr,
    HAS_ENTERING: tl.constexpr, STORE_INITIAL: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute dS over one segment of one head, from its last chunk to its first.

    With MAP_ONLY the kernel starts from zero (from d_final in a sequence's last segment) and writes
    E, the gradient before the segment's first token. Otherwise it starts from the scanned gradient
    after the segment and writes dv and the part V' dS^T of dk. fresh (V'), do, dv, dk and
    checkpoints share the strides stride_o; B may be stored in dv's rows. With g and without
    MAP_ONLY, the kernel writes <S, dS> before the segment's first token, and before the first of
    every KEEP tokens, to that token's entry of `begins` [B, T, H] fp32.
    Grid: (segments * H,).
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_b, i_n, t0, length, is_first, is_last = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    if MAP_ONLY:
        if is_first:
            return  # no segment precedes a sequence's first one
    rows = tl.arange(0, C)
    cols = tl.arange(0, BS)
    at = cols[:, None] * S + cols[None, :]
    inside = (cols < S)[:, None] & (cols < S)[None, :]
    own = (i_n * H + i_h) * S * S

    d_state = tl.zeros([BS, BS], dtype=tl.float32)
    if is_last:
        if HAS_FINAL:
            d_state += tl.load(d_final + own + at, mask=inside, other=0.0)
    elif HAS_ENTERING:
        behind = (tl.program_id(0) + H).to(tl.int64) * S * S  # the next segment, same head
        d_state += tl.load(entering + behind + at, mask=inside, other=0.0)

    n_chunks = tl.cdiv(length, C)
    left = length - (n_chunks - 1) * C
    t = t0 + (n_chunks - 1).to(tl.int64) * C
    p_q = row_pointers(q, i_b, t, i_h, stride_qb, stride_qt, stride_qh, rows, cols)
    p_k = row_pointers(k, i_b, t, i_h, stride_kb, stride_kt, stride_kh, rows, cols)
    p_do = row_pointers(do, i_b, t, i_h, stride_ob, stride_ot, stride_oh, rows, cols)
    p_dv = row_pointers(dv, i_b, t, i_h, stride_ob, stride_ot, stride_oh, rows, cols)
    p_dk = row_pointers(dk, i_b, t, i_h, stride_ob, stride_ot, stride_oh, rows, cols)
    p_a = inverse_pointers(inverse, i_b, t, i_h, stride_ab, stride_at, stride_ah, rows, C, PACK)
    p_fresh = row_pointers(fresh, i_b, t, i_h, stride_ob, stride_ot, stride_oh, rows, cols)
    if g is not None:
        p_g = token_pointers(g, i_b, t, i_h, T, H, rows)
        KEEP: tl.constexpr = max(BS, C)
        behind_chunk = length  # end of the current chunk in the segment
        if not MAP_ONLY:
            p_begin = token_pointers(begins, i_b, t0, i_h, T, H, 0)
            p_c = row_pointers(
                checkpoints, i_b, t0, i_h, stride_ob, stride_ot, stride_oh, cols, cols
            )
    for _ in range(0, n_chunks):
        mask = (rows < left)[:, None] & (cols < S)[None, :]
        b_q = tl.load(p_q, mask=mask, other=0.0)
        b_k = tl.load(p_k, mask=mask, other=0.0)
        b_do = tl.load(p_do, mask=mask, other=0.0)
        b_a, low_a = load_inverse(p_a, (rows < left)[:, None], C, b_k.dtype)
        # P^T: a row is a key, its columns the queries from it on
        Pt = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        if g is not None:
            b_g = tl.load(p_g, mask=rows < left, other=0.0)
            since = tl.cumsum(b_g, axis=0)
            whole = tl.sum(b_g, axis=0)
            after = log_decays_after(b_g, since, whole, b_k.dtype)
            before, after = tl.exp(since)[:, None], tl.exp(after)[:, None]
            gamma = decays_between(b_g, since, b_k.dtype)
            b_a, _ = decayed_inverse(b_a, low_a, gamma, b_k.dtype)
            Pt *= tl.trans(gamma)
            p_g -= C * H
            if not MAP_ONLY:
                if (behind_chunk % KEEP == 0) & (behind_chunk < length):
                    begin = (behind_chunk - KEEP).to(tl.int64) * stride_ot
                    state = tl.load(p_c + begin, mask=inside, other=0.0).to(tl.float32)
                    product = tl.sum(tl.sum(tl.trans(state) * d_state, axis=1), axis=0)
                    tl.store(p_begin + behind_chunk.to(tl.int64) * H, product)
        Pt = operand(tl.where(rows[:, None] <= rows[None, :], Pt * scale, 0.0), b_k.dtype)
        b_ds = operand(d_state, b_k.dtype)
        dV = tl.dot(Pt, b_do, input_precision=PRECISION)
        if g is None:
            dV += tl.dot(b_k, b_ds, input_precision=PRECISION)
        else:
            dV += tl.dot(b_k, b_ds, input_precision=PRECISION) * after
        dV = operand(dV, b_k.dtype)
        dV = tl.dot(tl.trans(b_a), dV, input_precision=PRECISION)
        if g is not None:
            decayed = operand(dV * before, b_k.dtype)
        dV = operand(dV, b_k.dtype)
        if not MAP_ONLY:
            tl.store(p_dv, dV, mask=mask)
            b_f = tl.load(p_fresh, mask=mask, other=0.0)
            part = tl.dot(b_f, tl.trans(b_ds), input_precision=PRECISION)
            if g is not None:
                part *= after
            tl.store(p_dk, part.to(dk.dtype.element_ty), mask=mask)
            p_dv -= C * stride_ot
            p_dk -= C * stride_ot
            p_fresh -= C * stride_ot
        b_qs = b_q.to(tl.float32) * scale
        if g is not None:
            b_qs *= before
            d_state *= tl.exp(whole)
            dV = decayed
            behind_chunk = (behind_chunk - 1) // C * C
        b_qs = operand(b_qs, b_k.dtype)
        d_state += tl.dot(tl.trans(b_qs), b_do, input_precision=PRECISION)
        d_state -= tl.dot(tl.trans(b_k), dV, input_precision=PRECISION)
        left = C
        p_q -= C * stride_qt
        p_k -= C * stride_kt
        p_do -= C * stride_ot
        p_a -= C * stride_at

    if g is not None:
        if not MAP_ONLY:
            if length > 0:
                state = load_entering_state(
                    initial_state, states, tl.program_id(0), own, at, inside, is_first, BS, BS, S,
                    H, initial_state is not None, states is not None,
                )  # fmt: skip
                tl.store(p_begin, tl.sum(tl.sum(state * d_state, axis=1), axis=0))
    if MAP_ONLY:
        tl.store(E_out + tl.program_id(0).to(tl.int64) * S * S + at, d_state, mask=inside)
    elif STORE_INITIAL:
        if is_first:
            tl.store(d_initial + own + at, d_state, mask=inside)


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def segment_input_grad_kernel(
    q, k, beta, g, fresh, do, dv, table, states, initial_state, dq, dk, dbeta, dg, T, NS, SEG,
    scale,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_ob, stride_ot, stride_oh,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    READ_STEP: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_STATES: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute the state again over one segment of one head; write dq, finish dk, sum dbeta.

    With dP = tril(dO V'^T) and dM = -strict_tril(dD V'^T): dQ = dO S^T + dP K,
    dK = V' dS^T - dV S^T + dP^T Q + (a dM + (a dM)^T) K + 2 K dlambda; dk already contains the
    first term. As V'_t = a_t (v_t - S_(t-1)^T k_t), and nothing else depends on a_t,
    da_t = dv_t V'_t / a_t^2. Each program stores one fp32 number in dbeta; with READ_STEP, where
    beta is a, one per token and head. With log decays g, it stores each token's writes for later
    tokens minus its reads of earlier ones in dg [B, T, H] fp32.
    fresh (V'), do, dv, dq and dk share the strides stride_o. Grid: (segments * H,).
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_b, i_n, t0, length, is_first, _ = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    rows = tl.arange(0, C)
    if READ_STEP:
        p_beta = token_pointers(beta, i_b, t0, i_h, T, H, rows)
        p_dbeta = token_pointers(dbeta, i_b, t0, i_h, T, H, rows)
    else:
        beta_h = tl.load(beta + i_h).to(tl.float32)
    if g is not None:
        p_g = token_pointers(g, i_b, t0, i_h, T, H, rows)
        p_dg = token_pointers(dg, i_b, t0, i_h, T, H, rows)
    cols = tl.arange(0, BS)
    p_q = row_pointers(q, i_b, t0, i_h, stride_qb, stride_qt, stride_qh, rows, cols)
    p_k = row_pointers(k, i_b, t0, i_h, stride_kb, stride_kt, stride_kh, rows, cols)
    p_fresh = row_pointers(fresh, i_b, t0, i_h, stride_ob, stride_ot, stride_oh, rows, cols)
    p_do = row_pointers(do, i_b, t0, i_h, stride_ob, stride_ot, stride_oh, rows, cols)
    p_dv = row_pointers(dv, i_b, t0, i_h, stride_ob, stride_ot, stride_oh, rows, cols)
    p_dq = row_pointers(dq, i_b, t0, i_h, stride_ob, stride_ot, stride_oh, rows, cols)
    p_dk = row_pointers(dk, i_b, t0, i_h, stride_ob, stride_ot, stride_oh, rows, cols)

    inside = (cols < S)[:, None] & (cols < S)[None, :]
    at = cols[:, None] * S + cols[None, :]
    own = (i_n * H + i_h) * S * S
    state = load_entering_state(
        initial_state, states, tl.program_id(0), own, at, inside, is_first, BS, BS, S, H,
        HAS_INITIAL, HAS_STATES,
    )  # fmt: skip

    if not READ_STEP:
        d_beta = tl.zeros([C], dtype=tl.float32)
    left = length
    for _ in range(0, tl.cdiv(length, C)):
        mask = (rows < left)[:, None] & (cols < S)[None, :]
        b_q = tl.load(p_q, mask=mask, other=0.0)
        b_k = tl.load(p_k, mask=mask, other=0.0)
        b_f = tl.load(p_fresh, mask=mask, other=0.0)
        b_do = tl.load(p_do, mask=mask, other=0.0)
        b_dv = tl.load(p_dv, mask=mask, other=0.0)
        k32 = b_k.to(tl.float32)
        if READ_STEP:
            a = tl.load(p_beta, mask=rows < left, other=0.0)
        else:
            lam = tl.sum(k32 * k32, axis=1)
            a = quasar_step_size(lam, beta_h)
        b_s = operand(state, b_k.dtype)

        VF = tl.dot(b_dv, tl.trans(b_f), input_precision=PRECISION)
        if g is not None:
            b_g = tl.load(p_g, mask=rows < left, other=0.0)
            since = tl.cumsum(b_g, axis=0)
            whole = tl.sum(b_g, axis=0)
            before = tl.exp(since)[:, None]
            gamma = decays_between(b_g, since, b_k.dtype)
            VF *= gamma
        a_dM = tl.where(rows[:, None] > rows[None, :], -VF, 0.0)
        # a is zero only for zero keys, on which no result depends
        inverse_a = tl.where(a > 0, 1.0 / tl.where(a > 0, a, 1.0), 0.0)
        da = tl.sum(b_dv.to(tl.float32) * b_f.to(tl.float32), axis=1) * inverse_a * inverse_a
        if READ_STEP:
            tl.store(p_dbeta, da, mask=rows < left)
        else:
            slope, share = quasar_step_size_bwd(lam, beta_h)
            d_beta += da * share

        dP = tl.dot(b_do, tl.trans(b_f), input_precision=PRECISION) * scale
        if g is not None:
            dP *= gamma
            QK = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            KK = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
            pairs = tl.where(rows[:, None] > rows[None, :], dP * QK, 0.0) + a_dM * KK
            written = tl.sum(pairs, axis=0) - tl.sum(pairs, axis=1)
        dP = operand(tl.where(rows[:, None] >= rows[None, :], dP, 0.0), b_k.dtype)
        dQ = tl.dot(b_do, tl.trans(b_s), input_precision=PRECISION) * scale
        if g is not None:
            dQ *= before
            written -= tl.sum(b_q.to(tl.float32) * dQ, axis=1)
        dQ += tl.dot(dP, b_k, input_precision=PRECISION)
        tl.store(p_dq, dQ.to(dq.dtype.element_ty), mask=mask)

        dK = tl.load(p_dk, mask=mask, other=0.0).to(tl.float32)
        if g is None:
            dK -= tl.dot(b_dv, tl.trans(b_s), input_precision=PRECISION)
        else:
            written += tl.sum(k32 * dK, axis=1)  # for tokens after the chunk
            reads = tl.dot(b_dv, tl.trans(b_s), input_precision=PRECISION) * before
            written += tl.sum(k32 * reads, axis=1)
            dK -= reads
        dK += tl.dot(tl.trans(dP), b_q, input_precision=PRECISION)
        both = operand(a_dM + tl.trans(a_dM), b_k.dtype)
        dK += tl.dot(both, b_k, input_precision=PRECISION)
        if not READ_STEP:
            dK += k32 * (2 * da * slope)[:, None]
        tl.store(p_dk, dK.to(dk.dtype.element_ty), mask=mask)

        if g is not None:
            tl.store(p_dg, written, mask=rows < left)
            after = log_decays_after(b_g, since, whole, b_k.dtype)
            b_f = operand(b_f.to(tl.float32) * tl.exp(after)[:, None], b_k.dtype)
            state *= tl.exp(whole)
            p_g += C * H
            p_dg += C * H
        if READ_STEP:
            p_beta += C * H
            p_dbeta += C * H
        state += tl.dot(tl.trans(b_k), b_f, input_precision=PRECISION)
        left -= C
        p_q += C * stride_qt
        p_k += C * stride_kt
        p_fresh += C * stride_ot
        p_do += C * stride_ot
        p_dv += C * stride_ot
        p_dq += C * stride_ot
        p_dk += C * stride_ot
    if not READ_STEP:
        tl.store(dbeta + tl.program_id(0), tl.sum(d_beta, axis=0))


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def decay_grad_kernel(
    dg, begins, table, T, NS, SEG, H: tl.constexpr, KEEP: tl.constexpr, IS_VARLEN: tl.constexpr
):
    """Replace the tokens' writes minus reads in dg by the gradient of g.

    Within every KEEP tokens, a token's gradient is the sum over the earlier tokens, plus the value
    of `begins` at the first of the KEEP tokens.
    Grid: (segments * H, programs that share a segment).
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_b, _, t0, length, _, _ = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    rows = tl.arange(0, KEEP)
    for t in range(tl.program_id(1) * KEEP, length, tl.num_programs(1) * KEEP):
        here = tl.minimum(length - t, KEEP)
        p_dg = token_pointers(dg, i_b, t0 + t, i_h, T, H, rows)
        written = tl.load(p_dg - H, mask=(rows > 0) & (rows < here), other=0.0)
        before = tl.load(token_pointers(begins, i_b, t0 + t, i_h, T, H, 0))
        tl.store(p_dg, before + tl.cumsum(written, axis=0), mask=rows < here)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
