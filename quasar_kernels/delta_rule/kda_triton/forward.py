"""KDA's forward pass in Triton: what needs no state, for all chunks at once, then the state's walk.

For a chunk with log decays since its start (gamma, of the whole chunk Gamma), A = (I + M)^-1,
M_ij = beta_i k_i k_j exp(gamma_i - gamma_j) for j < i, and state S:

    W = A beta (k exp(gamma))    U = A beta v    P_ij = scale q_i k_j exp(gamma_i - gamma_j), j <= i
    V' = U - W S                    O = scale (q exp(gamma)) S + P V'
    S' = exp(Gamma) S + (k exp(Gamma - gamma))^T V'

`chunk_kernel` stores W, U, P and the decayed q and k, so that a step of `walk_kernel` has four
products, no exponentials, and each of its results is the next product's left operand: the state is
transposed, [values, keys]. A segment of chunks is an affine map of the state, so long sequences are
cut, and `walk_kernel` also computes the maps. Tensors of tokens are contiguous, v and o
`[B, T, H, S]`; g is fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fla.ops.quasar.triton_kernels.device_functions import (
    _join_blocks,
    load_entering_state,
    load_segment,
    operand,
    unit_lower_inverse,
)

from quasar_kernels.delta_rule.kda_triton.exponents import (
    GROUP,
    exponents,
    from_diagonal,
    grouped,
    level_pairs,
    level_tokens,
    load_rows,
    masked_sums,
    since_start,
    store_rows,
    summand,
    until_end,
)


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def chunk_kernel(
    q,
    k,
    v,
    g,
    beta,
    table,
    reads,
    values,
    writes,
    queries,
    scores,
    inverse,
    decays,
    T,
    NS,
    SEG,
    scale,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,  # noqa: ARG001 # a constant of all kernels
    BK: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Write W (`reads`), U (`values`), the decayed k (`writes`) and q (`queries`), P and A.

    q and k have H / SHARED heads. P and A (`inverse`, or None) are `[B, T, H, C]`; `decays`, those
    of whole chunks, `[chunks, H, S]` fp32: chunk n of segment s, whose first token is t, is at
    t / C + s + n.
    Grid: (segments * H, ...), whose other sizes' product is at least the chunks of a segment.
    """
    i_s, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    i_b, _, t0, length, _, _ = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    left = length - i * C
    if left <= 0:
        return
    DTYPE: tl.constexpr = k.dtype.element_ty
    OPERAND: tl.constexpr = tl.float32 if DTYPE == tl.float32 else tl.float16
    HQ: tl.constexpr = H // SHARED
    N: tl.constexpr = C // GROUP
    OWN: tl.constexpr = min(BK, 32)  # columns of the products within groups
    t = i_b * T + t0 + i * C
    at, at_q = t * H + i_h, t * HQ + i_h // SHARED
    chunk = (((i_b * T + t0) // C + i_s + i) * H + i_h).to(tl.int64)
    i_c, member = tl.arange(0, C), tl.arange(0, GROUP)
    is_self = (member[:, None] == member[None, :])[None, :, :]
    own_kk = tl.zeros([N, GROUP, GROUP], dtype=tl.float32)
    own_qk = tl.zeros([N, GROUP, GROUP], dtype=tl.float32)
    columns = tl.arange(0, OWN)
    next_k = load_rows(k, at_q, i_c, left, columns, HQ, S)
    next_q = load_rows(q, at_q, i_c, left, columns, HQ, S)
    next_g = load_rows(g, at, i_c, left, columns, H, S)
    for first in range(0, S, OWN):
        b_k, b_q, b_g = grouped(next_k), grouped(next_q), grouped(exponents(next_g))
        columns = first + OWN + tl.arange(0, OWN)  # loaded before the products, which take longer
        next_k = load_rows(k, at_q, i_c, left, columns, HQ, S)
        next_q = load_rows(q, at_q, i_c, left, columns, HQ, S)
        next_g = load_rows(g, at, i_c, left, columns, H, S)
        x_g = summand(b_g, DTYPE)
        own_qk += tl.where(
            is_self, tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), axis=2)[:, :, None], 0.0
        )
        for level in tl.static_range(4):
            factor = tl.exp2(masked_sums(level_tokens(level, GROUP), x_g)).to(DTYPE)
            x, y = b_k * factor, b_q * factor
            pairs = level_pairs(level, GROUP)[None, :, :]
            across = tl.permute(x, (0, 2, 1))
            own_kk += tl.where(pairs, tl.dot(x, across, input_precision=PRECISION), 0.0)
            own_qk += tl.where(pairs, tl.dot(y, across, input_precision=PRECISION), 0.0)
    kk = tl.zeros([C, C], dtype=tl.float32)
    qk = tl.zeros([C, C], dtype=tl.float32)
    for first in range(0, S, BK):
        c_k = first + tl.arange(0, BK)
        b_k = load_rows(k, at_q, i_c, left, c_k, HQ, S)
        b_q = load_rows(q, at_q, i_c, left, c_k, HQ, S)
        b_g = exponents(load_rows(g, at, i_c, left, c_k, H, S))
        tl.store(decays + chunk * S + c_k, tl.exp2(tl.sum(b_g, axis=0)), mask=c_k < S)
        x_g = summand(b_g, DTYPE)
        factor = tl.exp2(masked_sums(until_end(C), x_g))
        kept = operand(b_k.to(tl.float32) * factor, DTYPE)
        store_rows(writes, kept, at, i_c, left, c_k, H, S)
        factor = tl.exp2(masked_sums(since_start(C), x_g))
        asked = operand(b_q.to(tl.float32) * factor * scale, DTYPE)
        store_rows(queries, asked, at, i_c, left, c_k, H, S)
        decayed = operand(b_k.to(tl.float32) * factor, DTYPE)
        store_rows(reads, decayed, at, i_c, left, c_k, H, S)
        for level in tl.static_range(C // 32):
            factor = tl.exp2(masked_sums(level_tokens(4 + level, C), x_g)).to(DTYPE)
            x, y = b_k * factor, b_q * factor
            pairs = level_pairs(4 + level, C, 2 * first)
            kk += tl.where(pairs, tl.dot(x, tl.trans(x), input_precision=PRECISION), 0.0)
            qk += tl.where(pairs, tl.dot(y, tl.trans(x), input_precision=PRECISION), 0.0)
    qk += from_diagonal(own_qk)
    store_rows(scores, operand(qk * scale, DTYPE), at, i_c, left, i_c, H, C)
    b_beta = tl.load(beta + at + i_c * H, mask=i_c < left, other=0.0).to(tl.float32)
    own_kk = own_kk * tl.reshape(b_beta, [N, GROUP])[:, :, None]
    A = from_diagonal(unit_lower_inverse(own_kk, OPERAND, PRECISION))
    kk *= b_beta[:, None]
    for level in tl.static_range(C // 32):
        A = _join_blocks(A, kk, GROUP << level, OPERAND, PRECISION)
    if inverse is not None:
        store_rows(inverse, operand(A, DTYPE), at, i_c, left, i_c, H, C)
    A = operand(A * b_beta[None, :], DTYPE)
    columns = tl.arange(0, BK)
    next_v = load_rows(v, at, i_c, left, columns, H, S)
    tl.debug_barrier()  # other threads stored the rows of `reads`
    next_decayed = load_rows(reads, at, i_c, left, columns, H, S)
    for _ in range(0, S, BK):
        decayed, b_v = next_decayed, next_v
        next_decayed = load_rows(reads, at, i_c, left, columns + BK, H, S)
        next_v = load_rows(v, at, i_c, left, columns + BK, H, S)
        W = tl.dot(A, decayed, input_precision=PRECISION)
        U = tl.dot(A, b_v, input_precision=PRECISION)
        store_rows(reads, operand(W, DTYPE), at, i_c, left, columns, H, S)
        store_rows(values, operand(U, DTYPE), at, i_c, left, columns, H, S)
        columns += BK


@triton.jit(do_not_specialize=["T", "NS", "SEG"])
def walk_kernel(
    reads,
    values,
    writes,
    queries,
    scores,
    decays,
    table,
    states,
    initial_state,
    final_state,
    o,
    fresh,
    checkpoints,
    G,
    R,
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
    """Compute o and the final state of one segment and head, for BV columns of the values.

    `fresh` (V', in o's layout) and `checkpoints` (the transposed state before each chunk, in the
    order of `decays`) may be None. If G is not None, the kernel computes the segment's map instead:
    a program gets BV columns of G, or of R, the state after the segment from a state of zero.
    Grid: (segments * H, S / BV); for maps (segments * H, 2 S / BV).
    """
    i_sh, i_h = tl.program_id(0), tl.program_id(0) % H
    i_s = i_sh // H
    i_b, i_n, t0, length, is_first, is_last = load_segment(table, i_s, T, NS, SEG, IS_VARLEN)
    DTYPE: tl.constexpr = reads.dtype.element_ty
    rows = tl.arange(0, C)
    c_k = tl.arange(0, BS)
    tile = tl.program_id(1)
    if G is not None:
        if is_last:
            return  # its map is not used
        tiles = tl.num_programs(1) // 2
        of_G = tile < tiles
        tile = tile % tiles
    c_v = tile * BV + tl.arange(0, BV)
    inside = (c_v < S)[:, None] & (c_k < S)[None, :]
    at = c_k[None, :] * S + c_v[:, None]
    own = (i_n * H + i_h).to(tl.int64) * S * S
    if G is not None:
        state = tl.where((c_v[:, None] == c_k[None, :]) & of_G, 1.0, 0.0)
    else:
        state = load_entering_state(
            initial_state, states, i_sh, own, at, inside, is_first, BV, BS, S, H,
            initial_state is not None, states is not None,
        )  # fmt: skip
    cell = (i_b * T + t0) // C + i_s
    for i in range(tl.cdiv(length, C)):
        left = length - i * C
        start = (i_b * T + t0 + i * C) * H + i_h
        b_w = load_rows(reads, start, rows, left, c_k, H, S)
        b_u = load_rows(values, start, rows, left, c_v, H, S)
        b_k = load_rows(writes, start, rows, left, c_k, H, S)
        chunk = ((cell + i) * H + i_h).to(tl.int64)
        decay = tl.load(decays + chunk * S + c_k, mask=c_k < S, other=0.0)
        entered = operand(state, DTYPE)
        if G is None:
            if checkpoints is not None:
                kept = checkpoints + chunk * S * S + c_v[:, None] * S + c_k[None, :]
                tl.store(kept, entered, mask=inside)
        V = tl.trans(b_u).to(tl.float32)
        if G is not None:
            V = tl.where(of_G, 0.0, V)
        V -= tl.dot(entered, tl.trans(b_w), input_precision=PRECISION)
        V = operand(V, DTYPE)
        if G is None:
            b_q = load_rows(queries, start, rows, left, c_k, H, S)
            b_p = load_rows(scores, start, rows, left, rows, H, C)
            O = tl.dot(entered, tl.trans(b_q), input_precision=PRECISION)
            O = tl.dot(V, tl.trans(b_p), acc=O, input_precision=PRECISION)
            store_rows(o, tl.trans(O), start, rows, left, c_v, H, S)
            if fresh is not None:
                store_rows(fresh, tl.trans(V), start, rows, left, c_v, H, S)
        state = state * decay[None, :]
        state = tl.dot(V, b_k, acc=state, input_precision=PRECISION)
    if G is not None:
        place = i_sh.to(tl.int64) * S * S + at
        if of_G:
            tl.store(G + place, state, mask=inside)
        else:
            tl.store(R + place, state, mask=inside)
    elif final_state is not None:
        if is_last:
            tl.store(final_state + own + at, state, mask=inside)
