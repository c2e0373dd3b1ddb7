"""Device functions for rows of heads, and the kernel that scans the states between segments."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_pointers(x, start, rows, columns, H: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to `rows` of one head of `[tokens, H, WIDTH]`, relative to row `start`."""
    return x + start * WIDTH + (rows[:, None] * (H * WIDTH) + columns[None, :])


@triton.jit
def load_rows(x, start, rows, left, columns, H: tl.constexpr, WIDTH: tl.constexpr):
    """Load the rows of `row_pointers` in x's dtype; zeros from row `left` on."""
    mask = (rows < left)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(row_pointers(x, start, rows, columns, H, WIDTH), mask=mask, other=0.0)


@triton.jit
def _one_after_the_other(decay_a, added_a, decay_b, added_b):
    return decay_a * decay_b, decay_b * added_a + added_b


@triton.jit(do_not_specialize=["NS"])
def segment_scan_kernel(
    sums, decays, entering, first, NS,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
    REVERSE: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Replace segments' additions by the states after them (with REVERSE: before), in place.

    A program scans one row of the states of a sequence and head, STEPS segments at a time.
    `entering` is the first state `[N, H, K, V]`, or None for zero. Grid: (N * H, V).
    """
    i_nh, i_v = tl.program_id(0), tl.program_id(1)
    i_n, i_h = i_nh // H, i_nh % H
    if IS_VARLEN:
        begin = tl.load(first + i_n).to(tl.int32)
        count = tl.load(first + i_n + 1).to(tl.int32) - begin - 1
    else:
        begin = i_n * NS
        count = NS - 1
    c_k = tl.arange(0, BK)
    steps = tl.arange(0, STEPS)
    state = tl.zeros([BK], dtype=tl.float32)
    if entering is not None:
        state += tl.load(
            entering + i_nh.to(tl.int64) * K * V + c_k * V + i_v, mask=c_k < K, other=0.0
        )
    for start in range(0, count, STEPS):
        step = start + steps
        if REVERSE:
            i_s = begin + count - step
        else:
            i_s = begin + step
        mask = (step < count)[:, None] & (c_k < K)[None, :]
        i_sh = (i_s * H + i_h).to(tl.int64)
        place = sums + (i_sh[:, None] * V + i_v) * K + c_k[None, :]
        added = tl.load(place, mask=mask, other=0.0)
        log_decay = tl.load(decays + i_sh[:, None] * K + c_k[None, :], mask=mask, other=0.0)
        decay, added = tl.associative_scan((tl.exp(log_decay), added), 0, _one_after_the_other)
        found = decay * state[None, :] + added
        tl.store(place, found, mask=mask)
        state = tl.sum(tl.where((steps == STEPS - 1)[:, None], found, 0.0), 0)
