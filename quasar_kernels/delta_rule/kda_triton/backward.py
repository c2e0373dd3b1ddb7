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
    CUT,
    level_pairs,
    level_tokens,
    level_tokens_transposed,
    load_rows,
    masked_sums,
    operands_of_sums,
    since_start,
    store_rows,
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
        decay = tl.exp(tl.load(decays + chunk * S + c_k, mask=c_k < S, other=0.0))
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
    H: tl.constexpr,
    GROUP: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Compute the inputs' gradients; dq and dk are those of each head of v, `[B, T, H, S]`.

    Grid: (segments * H, programs that share a segment).
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_b, _, t0, length, _, _ = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    DTYPE: tl.constexpr = k.dtype.element_ty
    HQ: tl.constexpr = H // GROUP
    rows = tl.arange(0, C)
    c_v = tl.arange(0, BS)
    cell = (i_b * T + t0) // C + i_s
    for i in range(tl.program_id(1), tl.cdiv(length, C), tl.num_programs(1)):
        left = length - i * C
        t = i_b * T + t0 + i * C
        at, at_q = t * H + i_h, t * HQ + i_h // GROUP
        b_beta = tl.load(beta + at + rows * H, mask=rows < left, other=0.0).to(tl.float32)
        b_a = load_rows(inverse, at, rows, left, rows, H, C)
        b_dV = load_rows(d_fresh, at, rows, left, c_v, H, S)
        D = tl.dot(tl.trans(b_a), b_dV, input_precision=PRECISION)
        store_rows(dv, D * b_beta[:, None], at, rows, left, c_v, H, S)
        b_v = load_rows(v, at, rows, left, c_v, H, S).to(tl.float32)
        db = tl.sum(D * b_v, axis=1)
        D = operand(D, DTYPE)
        b_V = load_rows(fresh, at, rows, left, c_v, H, S)
        b_do = load_rows(do, at, rows, left, c_v, H, S)
        dM = -tl.dot(D, tl.trans(b_V), input_precision=PRECISION)
        dP = tl.dot(b_do, tl.trans(b_V), input_precision=PRECISION) * scale
        itself = tl.sum(tl.where(rows[:, None] == rows[None, :], dP, 0.0), axis=1)[:, None]
        of_m, of_q = operand(dM, DTYPE), operand(dP, DTYPE)
        chunk = ((cell + i) * H + i_h).to(tl.int64)
        for first in range(0, S, BK):
            c_k = first + tl.arange(0, BK)
            b_k = load_rows(k, at_q, rows, left, c_k, HQ, S).to(tl.float32)
            b_q = load_rows(q, at_q, rows, left, c_k, HQ, S).to(tl.float32)
            b_g = tl.maximum(load_rows(g, at, rows, left, c_k, H, S), CUT)
            high, low = operands_of_sums(b_g, DTYPE)
            # the states before and after the chunk
            place = c_v[:, None] * S + c_k[None, :] + chunk * S * S
            is_state = (c_v < S)[:, None] & (c_k < S)[None, :]
            b_s = tl.load(checkpoints + place, mask=is_state, other=0.0)
            b_ds = tl.load(d_states + place, mask=is_state, other=0.0)
            through = tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), axis=0)
            through *= tl.exp(tl.sum(b_g, axis=0))
            factor = tl.exp(masked_sums(since_start(C), high, low))
            read = tl.dot(D, b_s, input_precision=PRECISION) * factor
            asked = tl.dot(b_do, b_s, input_precision=PRECISION) * factor * scale
            db -= tl.sum(b_k * read, axis=1)
            read *= b_beta[:, None]
            b_dk = b_q * itself - read
            b_dq = b_k * itself + asked
            # gradients of sums of log decays: until_end is the transposed since_start, but for the
            # token itself
            d_high, d_low = operands_of_sums(b_q * asked - b_k * read, DTYPE)
            b_dg = masked_sums(until_end(C), d_high, d_low) + (b_q * asked - b_k * read)
            factor = tl.exp(masked_sums(until_end(C), high, low))
            written = tl.dot(b_V, b_ds, input_precision=PRECISION) * factor
            b_dk += written
            d_high, d_low = operands_of_sums(b_k * written, DTYPE)
            b_dg += masked_sums(rows[:, None] > rows[None, :], d_high, d_low)
            b_dg += through[None, :]
            h = 1
            while h < C:
                factor = tl.exp(masked_sums(level_tokens(h, C), high, low))
                x, y = operand(b_k * factor, DTYPE), operand(b_q * factor, DTYPE)
                pairs = level_pairs(h, C)
                m = tl.where(pairs, of_m, 0.0).to(DTYPE)
                p = tl.where(pairs, of_q, 0.0).to(DTYPE)
                row = tl.dot(m, x, input_precision=PRECISION)
                dy = tl.dot(p, x, input_precision=PRECISION)
                wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
                db += tl.sum(wide_x * row, axis=1)
                scaled = operand(wide_x * b_beta[:, None], DTYPE)
                dx = tl.dot(tl.trans(m), scaled, input_precision=PRECISION)
                dx = tl.dot(tl.trans(p), y, acc=dx, input_precision=PRECISION)
                dx += row * b_beta[:, None]
                b_dk += dx * factor
                b_dq += dy * factor
                d_high, d_low = operands_of_sums(wide_x * dx + wide_y * dy, DTYPE)
                b_dg += masked_sums(level_tokens_transposed(h, C), d_high, d_low)
                h *= 2
            store_rows(dq, b_dq, at, rows, left, c_k, H, S)
            store_rows(dk, b_dk, at, rows, left, c_k, H, S)
            store_rows(dg, b_dg, at, rows, left, c_k, H, S)
        tl.store(d_beta + at + rows * H, db, mask=rows < left)
