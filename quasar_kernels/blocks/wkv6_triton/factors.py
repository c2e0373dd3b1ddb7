"""Device functions of WKV6: how decays within a chunk become factors of r and k, and its scores.

What token i reads from an earlier token j of its chunk carries, a channel, the decay of the tokens
in between. Measured from the chunk's middle it is a factor of r_i times one of k_j, one of which
may grow. Where a half of the chunk decays by more than exp(-LIMIT) in any channel, r is
measured from the chunk's start and k to its end instead, which both only shrink, and the scores are
computed column by column from sums of log decays of the tokens in between alone. So nothing
overflows and no digits are lost, however strong a decay is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quasar_kernels.blocks.triton_segments.kernels import load_rows

LIMIT = tl.constexpr(60.0)
"""Largest exponent of a factor: fp32 and bf16 end at exp(88)."""
CUT = tl.constexpr(-104.0)
"""Log decays are cut off here, under which exp is 0 in fp32: so -inf is a number."""


@triton.jit
def load_log_decays(w, start, rows, left, columns, H: tl.constexpr, WIDTH: tl.constexpr):
    """Load log decays as fp32, cut off at CUT; zeros from row `left` on."""
    return tl.maximum(load_rows(w, start, rows, left, columns, H, WIDTH).to(tl.float32), CUT)


@triton.jit
def until(w):
    """Return the log decay from before the chunk's first row to before each."""
    return tl.cumsum(w, 0) - w


@triton.jit
def after(w):
    """Return the log decay from behind each row to behind the chunk's last."""
    return tl.cumsum(w, 0, reverse=True) - w


@triton.jit
def exponents(w):
    """Return how r and k of a chunk are scaled, from its log decays `[C, K]`.

    Returns:
        of r and of k `[C, K]`; what is missing to r from the chunk's start and to k to its end,
        `[K]`; the whole chunk's log decay `[K]`; and whether it is too strong for one product.
    """
    C: tl.constexpr = w.shape[0]
    rows = tl.arange(0, C)
    whole = tl.sum(w, 0)
    start = tl.sum(tl.where(rows[:, None] < C // 2, w, 0.0), 0)
    end = whole - start
    strong = tl.max(tl.maximum(-start, -end), 0) > LIMIT
    of_r = until(w)
    if strong:
        of_k = after(w)
        start = tl.zeros_like(start)
        end = tl.zeros_like(end)
    else:
        of_k = start[None, :] - tl.cumsum(w, 0)
        of_r -= start[None, :]
    return of_r, of_k, start, end, whole, strong


@triton.jit
def row_of(x, j):
    """Return row j of `[C, K]` as `[K]`."""
    rows = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(rows[:, None] == j, x, 0.0), 0)


@triton.jit
def column_of(x, j):
    """Return column j of `[C, C]` as `[C]`."""
    columns = tl.arange(0, x.shape[1])
    return tl.sum(tl.where(columns[None, :] == j, x, 0.0), 1)


@triton.jit
def strong_scores(r, k, w):
    """Return what tokens read from earlier ones, `[C, C]`, by columns, for any decays; all fp32."""
    C: tl.constexpr = w.shape[0]
    index = tl.arange(0, C)
    between = tl.zeros_like(w)
    scores = tl.zeros([C, C], dtype=tl.float32)
    for m in range(C):
        j = C - 1 - m
        later = (index > j)[:, None]
        decayed = tl.where(later, tl.exp(between), 0.0) * row_of(k, j)[None, :]
        column = tl.sum(r * decayed, 1)
        scores = tl.where(index[None, :] == j, column[:, None], scores)
        between += tl.where(later, row_of(w, j)[None, :], 0.0)
    return scores


@triton.jit
def strong_score_gradients(r, k, w, gradient):
    """Return the gradients of r and k `[C, K]` from that of `strong_scores`; all fp32."""
    C: tl.constexpr = w.shape[0]
    index = tl.arange(0, C)
    between = tl.zeros_like(w)
    dr = tl.zeros_like(w)
    dk = tl.zeros_like(w)
    for m in range(C):
        j = C - 1 - m
        later = (index > j)[:, None]
        share = tl.where(later, tl.exp(between), 0.0) * column_of(gradient, j)[:, None]
        dr += share * row_of(k, j)[None, :]
        dk = tl.where(index[:, None] == j, tl.sum(share * r, 0)[None, :], dk)
        between += tl.where(later, row_of(w, j)[None, :], 0.0)
    return dr, dk
