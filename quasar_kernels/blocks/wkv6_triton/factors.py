"""Device functions of WKV6: the decays within a chunk as factors of r and k, and its scores.

The score of tokens i and j < i of a chunk has, in each channel, the decay of the tokens in between.
Relative to the chunk's middle, this decay is a factor of r_i times a factor of k_j, and one of the
two may exceed 1. If half of the chunk decays by more than exp(-LIMIT) in any channel, that factor
could overflow. r is then scaled relative to the chunk's start and k relative to its end, by factors
of at most 1, and the scores are computed column by column from sums of the log decays in between.
So no decay overflows or loses digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quasar_kernels.blocks.triton_segments.kernels import load_rows

LIMIT = tl.constexpr(60.0)
"""Largest exponent of a factor: fp32 and bf16 overflow at exp(88)."""
CUT = tl.constexpr(-104.0)
"""Lower log decays are raised to this, because sums of -inf give NaN; its exp is 0 in fp32."""


@triton.jit
def load_log_decays(w, start, rows, left, columns, H: tl.constexpr, WIDTH: tl.constexpr):
    """Load log decays as fp32, clamped to CUT; zeros from row `left` on."""
    return tl.maximum(load_rows(w, start, rows, left, columns, H, WIDTH).to(tl.float32), CUT)


@triton.jit
def until(w):
    """Return for each row the sum of the log decays of the rows before it."""
    return tl.cumsum(w, 0) - w


@triton.jit
def after(w):
    """Return for each row the sum of the log decays of the rows after it."""
    return tl.cumsum(w, 0, reverse=True) - w


@triton.jit
def exponents(w):
    """Return of_r, of_k, start, end, whole and strong of a chunk, from its log decays `[C, K]`.

    of_r and of_k `[C, K]` are the logarithms of the factors of r and k. They are relative to the
    chunk's middle: start `[K]` is the log decay up to it, end `[K]` that after it. If the decays
    are `strong`, they are relative to the chunk's start and end, and start and end are 0. whole
    `[K]` is the chunk's log decay.
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
    """Return the scores of tokens and earlier ones, `[C, C]`, by columns, for any decays; fp32."""
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
