"""KDA's backward pass in Triton: the walk of the state's gradient, then all chunks at once.

With forward.py's names and dS' the gradient of the state after a chunk:

    dV' = P^T dO + (k exp(Gamma - gamma)) dS'
    dS = exp(Gamma) dS' + (scale q exp(gamma))^T dO - W^T dV'

`state_grad_kernel` walks the transposed dS from the last chunk to the first and stores dV' and dS'.
Then the chunks are independent, with D = A^T dV', dM = -D V'^T (j < i) and dP = dO V'^T (j <= i):
dv = beta D, and the gradients of q, k and g come from the products of forward.py, level by level.
The gradient of an exponent is that of a sum of log decays, so g's gradient is a sum, too, never a
difference: tiny gradients of strong decays keep their digits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fla.ops.quasar.triton_kernels.device_functions import load_segment, operand

from quasar_kernels.delta_rule.kda_triton.exponents import (
    GROUP,
    diagonal_of,
    exact_sums,
    exponents,
    grouped,
    level_pairs,
    level_tokens,
    level_tokens_transposed,
    load_rows,
    masked_sums,
    rows_of,
    since_start,
    store_rows,
    summand,
    until_end,
)


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def state_grad_kernel(
    reads,
    writes,
    queries,
    scores,
    do,
    decays,
    table,
    entering,
    d_final,
    d_initial,
    d_fresh,
    d_states,
    E,
    T,
    NS,
    SEG,
    H: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Walk the state's gradient over one segment of one head, for BV columns of the values.

    Writes `d_fresh` (dV'), `d_states` (the transposed dS' of each chunk) and `d_initial`, if not
    None. If E is not None, the kernel starts from zero (from `d_final` in a sequence's last
    segment) and writes only E, the gradient before the segment. `entering` are the scanned
    gradients before the segments. Grid: (segments * H, S / BV).
    """
    i_sh, i_h = tl.program_id(0), tl.program_id(0) % H
    i_s = i_sh // H
    i_b, i_n, t0, length, is_first, is_last = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    if E is not None:
        if is_first:
            return  # no segment precedes it
    DTYPE: tl.constexpr = reads.dtype.element_ty
    rows = tl.arange(0, C)
    c_k = tl.arange(0, BS)
    c_v = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = (c_v < S)[:, None] & (c_k < S)[None, :]
    at = c_k[None, :] * S + c_v[:, None]
    own = (i_n * H + i_h).to(tl.int64) * S * S
    d_state = tl.zeros([BV, BS], dtype=tl.float32)
    if is_last:
        if d_final is not None:
            d_state += tl.load(d_final + own + at, mask=inside, other=0.0)
    elif entering is not None:
        behind = (i_sh + H).to(tl.int64) * S * S  # the next segment, same head
        d_state += tl.load(entering + behind + at, mask=inside, other=0.0)
    cell = (i_b * T + t0) // C + i_s
    n = tl.cdiv(length, C)
    for m in range(n):
        i = n - 1 - m
        left = length - i * C
        start = (i_b * T + t0 + i * C) * H + i_h
        b_w = load_rows(reads, start, rows, left, c_k, H, S)
        b_k = load_rows(writes, start, rows, left, c_k, H, S)
        b_q = load_rows(queries, start, rows, left, c_k, H, S)
        b_p = load_rows(scores, start, rows, left, rows, H, C)
        b_do = tl.trans(load_rows(do, start, rows, left, c_v, H, S))
        chunk = ((cell + i) * H + i_h).to(tl.int64)
        decay = tl.load(decays + chunk * S + c_k, mask=c_k < S, other=0.0)
        leaving = operand(d_state, DTYPE)
        dV = tl.dot(leaving, tl.trans(b_k), input_precision=PRECISION)
        dV = operand(tl.dot(b_do, b_p, acc=dV, input_precision=PRECISION), DTYPE)
        if E is None:
            place = d_states + chunk * S * S + c_v[:, None] * S + c_k[None, :]
            tl.store(place, leaving, mask=inside)
            store_rows(d_fresh, tl.trans(dV), start, rows, left, c_v, H, S)
        d_state = d_state * decay[None, :]
        d_state = tl.dot(b_do, b_q, acc=d_state, input_precision=PRECISION)
        d_state -= tl.dot(dV, b_w, input_precision=PRECISION)
    if E is not None:
        tl.store(E + i_sh.to(tl.int64) * S * S + at, d_state, mask=inside)
    elif d_initial is not None:
        if is_first:
            tl.store(d_initial + own + at, d_state, mask=inside)


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def input_grad_kernel(
    q,
    k,
    v,
    g,
    beta,
    inverse,
    fresh,
    do,
    d_fresh,
    checkpoints,
    d_states,
    table,
    dq,
    dk,
    dv,
    dg,
    d_beta,
    T,
    NS,
    SEG,
    scale,
    tokens,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Compute the inputs' gradients; dq and dk are those of each head of v, `[B, T, H, S]`.

    A program computes BK columns of a chunk's gradients, and their share of d_beta, which is
    `[S / BK, B, T, H]`. Grid: (segments * H * S / BK, ...), as for `chunk_kernel`.
    """
    PARTS: tl.constexpr = tl.cdiv(S, BK)
    part, i_sh = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    i_s, i_h = i_sh // H, i_sh % H
    i = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    i_b, _, t0, length, _, _ = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    left = length - i * C
    if left <= 0:
        return
    DTYPE: tl.constexpr = k.dtype.element_ty
    HQ: tl.constexpr = H // SHARED
    N: tl.constexpr = C // GROUP
    t = i_b * T + t0 + i * C
    at, at_q = t * H + i_h, t * HQ + i_h // SHARED
    chunk = (((i_b * T + t0) // C + i_s + i) * H + i_h).to(tl.int64)
    rows, c_v = tl.arange(0, C), tl.arange(0, BS)
    c_k = part * BK + tl.arange(0, BK)
    b_beta = tl.load(beta + at + rows * H, mask=rows < left, other=0.0).to(tl.float32)
    b_a = tl.trans(load_rows(inverse, at, rows, left, rows, H, C))
    D = tl.dot(b_a, load_rows(d_fresh, at, rows, left, c_k, H, S), input_precision=PRECISION)
    store_rows(dv, D * b_beta[:, None], at, rows, left, c_k, H, S)
    db = tl.sum(D * load_rows(v, at, rows, left, c_k, H, S).to(tl.float32), axis=1)
    D = tl.dot(b_a, load_rows(d_fresh, at, rows, left, c_v, H, S), input_precision=PRECISION)
    D = operand(D, DTYPE)
    b_V = load_rows(fresh, at, rows, left, c_v, H, S)
    b_do = load_rows(do, at, rows, left, c_v, H, S)
    dM = -tl.dot(D, tl.trans(b_V), input_precision=PRECISION)
    scaled, dM = operand(dM * b_beta[:, None], DTYPE), operand(dM, DTYPE)
    dP = operand(tl.dot(b_do, tl.trans(b_V), input_precision=PRECISION) * scale, DTYPE)
    b_k = load_rows(k, at_q, rows, left, c_k, HQ, S)
    b_q = load_rows(q, at_q, rows, left, c_k, HQ, S)
    b_g = exponents(load_rows(g, at, rows, left, c_k, H, S))
    x_g = summand(b_g, DTYPE)
    # the states before and after the chunk
    place = c_v[:, None] * S + c_k[None, :] + chunk * S * S
    is_state = (c_v < S)[:, None] & (c_k < S)[None, :]
    b_s = tl.load(checkpoints + place, mask=is_state, other=0.0)
    b_ds = tl.load(d_states + place, mask=is_state, other=0.0)
    through = tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), axis=0)
    b_dg = (through * tl.exp2(tl.sum(b_g, axis=0)))[None, :]
    factor = tl.exp2(masked_sums(since_start(C), x_g))
    read = tl.dot(D, b_s, input_precision=PRECISION) * factor
    asked = tl.dot(b_do, b_s, input_precision=PRECISION) * factor * scale
    db -= tl.sum(b_k.to(tl.float32) * read, axis=1)
    read *= b_beta[:, None]
    b_dq = asked
    # until_end is the transposed since_start, but for the token itself
    d_factor = b_q.to(tl.float32) * asked - b_k.to(tl.float32) * read
    b_dg += d_factor + exact_sums(until_end(C), d_factor, DTYPE)
    factor = tl.exp2(masked_sums(until_end(C), x_g))
    written = tl.dot(b_V, b_ds, input_precision=PRECISION) * factor
    b_dk = written - read
    b_dg += exact_sums(rows[:, None] > rows[None, :], b_k.to(tl.float32) * written, DTYPE)
    # pairs of groups
    for level in range(C // 32):
        factor = tl.exp2(masked_sums(level_tokens(4 + level, C), x_g))
        x, y = b_k * factor.to(DTYPE), b_q * factor.to(DTYPE)
        pairs = level_pairs(4 + level, C)
        m = tl.where(pairs, dM, 0.0).to(DTYPE)
        p = tl.where(pairs, dP, 0.0).to(DTYPE)
        row = tl.dot(m, x, input_precision=PRECISION)
        dy = tl.dot(p, x, input_precision=PRECISION)
        db += tl.sum(x.to(tl.float32) * row, axis=1)
        m = tl.where(pairs, scaled, 0.0).to(DTYPE)
        dx = row * b_beta[:, None]
        dx += tl.dot(tl.trans(m), x, input_precision=PRECISION)
        dx = tl.dot(tl.trans(p), y, acc=dx, input_precision=PRECISION)
        b_dk += dx * factor
        b_dq += dy * factor
        d_factor = x.to(tl.float32) * dx + y.to(tl.float32) * dy
        b_dg += exact_sums(level_tokens_transposed(4 + level, C), d_factor, DTYPE)
    # pairs within a group
    own_k, own_q = grouped(b_k), grouped(b_q)
    own_g = grouped(x_g)
    own_M, own_P = diagonal_of(dM).to(DTYPE), diagonal_of(dP).to(DTYPE)
    own_beta = tl.reshape(b_beta, [N, GROUP])[:, :, None]
    own_scaled = operand(own_M.to(tl.float32) * own_beta, DTYPE)
    member = tl.arange(0, GROUP)
    is_self = (member[:, None] == member[None, :])[None, :, :]
    itself = tl.sum(tl.where(is_self, own_P.to(tl.float32), 0.0), axis=2)[:, :, None]
    own_dk, own_dq = own_q.to(tl.float32) * itself, own_k.to(tl.float32) * itself
    own_dg = tl.zeros([N, GROUP, BK], dtype=tl.float32)
    own_db = tl.zeros([N, GROUP], dtype=tl.float32)
    for level in range(4):
        own_factor = tl.exp2(masked_sums(level_tokens(level, GROUP), own_g))
        own_x, own_y = own_k * own_factor.to(DTYPE), own_q * own_factor.to(DTYPE)
        own_pairs = level_pairs(level, GROUP)[None, :, :]
        own_m = tl.where(own_pairs, own_M, 0.0).to(DTYPE)
        own_p = tl.where(own_pairs, own_P, 0.0).to(DTYPE)
        own_row = tl.dot(own_m, own_x, input_precision=PRECISION)
        own_dy = tl.dot(own_p, own_x, input_precision=PRECISION)
        own_db += tl.sum(own_x.to(tl.float32) * own_row, axis=2)
        own_m = tl.where(own_pairs, own_scaled, 0.0).to(DTYPE)
        own_dx = own_row * own_beta
        own_dx += tl.dot(tl.permute(own_m, (0, 2, 1)), own_x, input_precision=PRECISION)
        own_dx = tl.dot(tl.permute(own_p, (0, 2, 1)), own_y, acc=own_dx, input_precision=PRECISION)
        own_dk += own_dx * own_factor
        own_dq += own_dy * own_factor
        # the gradient of an exponent reaches all g that it is a sum of
        d_exponent = own_x.to(tl.float32) * own_dx + own_y.to(tl.float32) * own_dy
        own_dg += exact_sums(level_tokens_transposed(level, GROUP), d_exponent, DTYPE)
    store_rows(dq, b_dq + rows_of(own_dq), at, rows, left, c_k, H, S)
    store_rows(dk, b_dk + rows_of(own_dk), at, rows, left, c_k, H, S)
    store_rows(dg, b_dg + rows_of(own_dg), at, rows, left, c_k, H, S)
    db += tl.reshape(own_db, [C])
    place = d_beta + part * (tokens * H) + at + rows * H
    tl.store(place, db, mask=rows < left)
