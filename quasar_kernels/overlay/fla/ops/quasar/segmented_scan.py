"""The Triton kernels of the segmented scan: segment maps, their scan, and the outputs.

A state is `[S, S]`, key dimension first, fp32. BS is S padded to a power of two. q, k, v and o are
read and written by their own batch, token and head strides (last stride 1), with 64-bit offsets:
T * H * S may pass 2^31. README.md in this folder has the algebra.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.quasar.gate import quasar_step_size


@triton.jit
def _operand(x, DTYPE: tl.constexpr):
    # fp16 saturates instead of turning into infinity
    if DTYPE == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(DTYPE)


@triton.jit
def _join_blocks(A, M, rows, cols, HALF: tl.constexpr, PRECISION: tl.constexpr):
    # inverses of the HALF x HALF diagonal blocks -> inverses of the 2 HALF x 2 HALF blocks
    below = (rows // (2 * HALF) == cols // (2 * HALF)) & (rows // HALF > cols // HALF)
    off = tl.where(below, M, 0.0)
    return A - tl.dot(tl.dot(A, off, input_precision=PRECISION), A, input_precision=PRECISION)


@triton.jit
def _chunk_inverse(k, beta, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return a [C] and A = (I + strict_tril(a K K^T))^-1 [C, C], both fp32, of one chunk's keys."""
    rows = tl.arange(0, C)[:, None]
    cols = tl.arange(0, C)[None, :]
    k32 = k.to(tl.float32)
    a = quasar_step_size(tl.sum(k32 * k32, axis=1), beta)
    M = a[:, None] * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    M = tl.where(rows > cols, M, 0.0)
    # the 2 x 2 blocks need no product
    A = tl.where(rows == cols, 1.0, 0.0) - tl.where(rows // 2 == cols // 2, M, 0.0)
    A = _join_blocks(A, M, rows, cols, 2, PRECISION)
    A = _join_blocks(A, M, rows, cols, 4, PRECISION)
    A = _join_blocks(A, M, rows, cols, 8, PRECISION)
    if C >= 32:
        A = _join_blocks(A, M, rows, cols, 16, PRECISION)
    if C >= 64:
        A = _join_blocks(A, M, rows, cols, 32, PRECISION)
    return a, A


@triton.jit
def _rows(x, i_b, t, i_h, stride_b, stride_t, stride_h, rows, cols):
    # pointers to rows t + rows of one batch row and head
    start = i_b * stride_b + t * stride_t + i_h * stride_h
    return x + start + rows[:, None] * stride_t + cols[None, :]


@triton.jit
def _segment(table, i_s, T, NS, SEG, IS_VARLEN: tl.constexpr):
    """Return batch row, sequence, first token, tokens, is first, is last of segment i_s."""
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


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def segment_map_kernel(
    k,
    v,
    beta,
    table,
    G_out,
    R_out,
    T,
    NS,
    SEG,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    H: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    BR: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Rows of G and R of one segment and head, scanned from the segment's last chunk to its first.

    Backward, G (I, at the end) absorbs a chunk by Z = G K^T, Y = Z A diag(a), R += Y V, G -= Y K:
    four products a chunk, each row of G on its own. Grid: (segments * H, S / BR).
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_r = tl.program_id(1)
    i_b, _, t0, length, _, is_last = _segment(table, i_s, T, NS, SEG, IS_VARLEN)
    if is_last:
        return  # no segment starts from the state behind a sequence's last one
    beta_h = tl.load(beta + i_h).to(tl.float32)
    rows = tl.arange(0, C)
    cols = tl.arange(0, BS)
    r = i_r * BR + tl.arange(0, BR)

    n_chunks = tl.cdiv(length, C)
    left = length - (n_chunks - 1) * C  # tokens in the chunk at hand: full ones follow
    t_last = t0 + (n_chunks - 1).to(tl.int64) * C
    p_k = _rows(k, i_b, t_last, i_h, stride_kb, stride_kt, stride_kh, rows, cols)
    p_v = _rows(v, i_b, t_last, i_h, stride_vb, stride_vt, stride_vh, rows, cols)

    G = tl.where(r[:, None] == cols[None, :], 1.0, 0.0)
    R = tl.zeros([BR, BS], dtype=tl.float32)
    for _ in range(0, n_chunks):
        mask = (rows < left)[:, None] & (cols < S)[None, :]
        b_k = tl.load(p_k, mask=mask, other=0.0)
        b_v = tl.load(p_v, mask=mask, other=0.0)
        a, A = _chunk_inverse(b_k, beta_h, C, INVERSE)
        Z = tl.dot(_operand(G, b_k.dtype), tl.trans(b_k), input_precision=PRECISION)
        Y = tl.dot(
            _operand(Z, b_k.dtype), _operand(A * a[None, :], b_k.dtype), input_precision=PRECISION
        )
        Y = _operand(Y, b_k.dtype)
        R += tl.dot(Y, b_v, input_precision=PRECISION)
        G -= tl.dot(Y, b_k, input_precision=PRECISION)
        left = C
        p_k -= C * stride_kt
        p_v -= C * stride_vt

    out = (tl.program_id(0).to(tl.int64) * S * S) + r[:, None] * S + cols[None, :]
    inside = (r < S)[:, None] & (cols < S)[None, :]
    tl.store(G_out + out, G, mask=inside)
    tl.store(R_out + out, R, mask=inside)


@triton.jit(do_not_specialize=["NS"])
def segment_scan_kernel(
    G,
    R,
    initial_state,
    first,
    NS,
    H: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Turn the maps of a sequence's segments into states: R[n] becomes the state after segment n.

    Grid: (sequences * H, S / BV); each program owns BV value columns of one head's state.
    """
    i_n, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    if IS_VARLEN:
        s0 = tl.load(first + i_n)
        s1 = tl.load(first + i_n + 1)
    else:
        s0 = i_n.to(tl.int64) * NS
        s1 = s0 + NS
    rows = tl.arange(0, BS)
    cols = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = (rows < S)[:, None] & (cols < S)[None, :]
    square = (rows < S)[:, None] & (rows < S)[None, :]
    at = rows[:, None] * S + cols[None, :]
    state = tl.zeros([BS, BV], dtype=tl.float32)
    if HAS_INITIAL:
        state += tl.load(
            initial_state + tl.program_id(0).to(tl.int64) * S * S + at, mask=inside, other=0.0
        )
    p_G = G + (s0 * H + i_h) * S * S + rows[:, None] * S + rows[None, :]
    p_R = R + (s0 * H + i_h) * S * S + at
    for _ in range(0, (s1 - s0 - 1).to(tl.int32)):
        b_G = tl.load(p_G, mask=square, other=0.0)
        b_R = tl.load(p_R, mask=inside, other=0.0)
        state = tl.dot(b_G, state, input_precision="tf32x3") + b_R
        tl.store(p_R, state, mask=inside)
        p_G += H * S * S
        p_R += H * S * S


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def segment_output_kernel(
    q,
    k,
    v,
    beta,
    table,
    states,
    initial_state,
    final_state,
    o,
    T,
    NS,
    SEG,
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    H: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_STATES: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    STORE_FRESH: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Walk one segment of one head from its entering state and write o (and the final state).

    A chunk: D = a (V - K S), V' = A D, O = Q S + tril(Q K^T) V', S += K^T V'; everything but the
    reads of q, k, v and the write of o stays on chip. With STORE_FRESH it writes V' in place of o,
    for the backward pass, and reads no q. Grid: (segments * H, S / BV).
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_b, i_n, t0, length, is_first, is_last = _segment(table, i_s, T, NS, SEG, IS_VARLEN)
    beta_h = tl.load(beta + i_h).to(tl.float32)
    rows = tl.arange(0, C)
    cols = tl.arange(0, BS)
    v_cols = tl.program_id(1) * BV + tl.arange(0, BV)
    p_q = _rows(q, i_b, t0, i_h, stride_qb, stride_qt, stride_qh, rows, cols)
    p_k = _rows(k, i_b, t0, i_h, stride_kb, stride_kt, stride_kh, rows, cols)
    p_v = _rows(v, i_b, t0, i_h, stride_vb, stride_vt, stride_vh, rows, v_cols)
    p_o = _rows(o, i_b, t0, i_h, stride_ob, stride_ot, stride_oh, rows, v_cols)

    inside = (cols < S)[:, None] & (v_cols < S)[None, :]
    at = cols[:, None] * S + v_cols[None, :]
    own = (i_n * H + i_h) * S * S  # this sequence's place in [N, H, S, S]
    state = tl.zeros([BS, BV], dtype=tl.float32)
    if is_first:
        if HAS_INITIAL:
            state += tl.load(initial_state + own + at, mask=inside, other=0.0)
    elif HAS_STATES:
        before = (tl.program_id(0) - H).to(tl.int64) * S * S  # the segment before, same head
        state += tl.load(states + before + at, mask=inside, other=0.0)

    left = length
    for _ in range(0, tl.cdiv(length, C)):
        mask = (rows < left)[:, None] & (cols < S)[None, :]
        v_mask = (rows < left)[:, None] & (v_cols < S)[None, :]
        b_k = tl.load(p_k, mask=mask, other=0.0)
        b_v = tl.load(p_v, mask=v_mask, other=0.0)
        a, A = _chunk_inverse(b_k, beta_h, C, INVERSE)
        b_s = _operand(state, b_k.dtype)
        D = a[:, None] * (b_v.to(tl.float32) - tl.dot(b_k, b_s, input_precision=PRECISION))
        V32 = tl.dot(A, D, input_precision=INVERSE)
        V = _operand(V32, b_k.dtype)
        if STORE_FRESH:
            tl.store(p_o, V, mask=v_mask)
        else:
            b_q = tl.load(p_q, mask=mask, other=0.0)
            P = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            P = tl.where(rows[:, None] >= rows[None, :], P, 0.0)
            O = tl.dot(b_q, b_s, input_precision=PRECISION)
            O += tl.dot(P, V32, input_precision=INVERSE)
            tl.store(p_o, (O * scale).to(o.dtype.element_ty), mask=v_mask)
            p_q += C * stride_qt
        state += tl.dot(tl.trans(b_k), V, input_precision=PRECISION)
        if b_k.dtype != tl.float32:
            # V' telescopes in the state when keys repeat, so its rounding would add up there
            V = _operand(V32 - V.to(tl.float32), b_k.dtype)
            state += tl.dot(tl.trans(b_k), V, input_precision=PRECISION)
        left -= C
        p_k += C * stride_kt
        p_v += C * stride_vt
        p_o += C * stride_ot

    if STORE_FINAL:
        if is_last:
            tl.store(final_state + own + at, state, mask=inside)
