"""Device functions of KDA: decays between the tokens of a chunk, as factors of at most 1.

The product of tokens i and j < i of a chunk has, in each channel, the decay of the tokens after j
until i. It is a factor of i's row times a factor of j's row, relative to a token in between. The
pairs are therefore divided into levels. At level h (1, 2, 4, ..., half a chunk), tokens form groups
of h; i is in an odd group and j in the even group before it. The row of i has the decay since its
group's start, and j's row the decay until its group's end. A token has one role at a level, so one
set of factors is enough for both. All exponents are sums of log decays of the same sign, products
with a matrix of zeros and ones, and never differences, so weak decays next to strong ones keep
their digits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fla.ops.quasar.triton_kernels.device_functions import split

CUT = tl.constexpr(-110.0)
"""Log decays are raised to this, below which exp is 0 in fp32: sums of -inf would give NaN."""


@triton.jit
def load_rows(x, start, rows, left, columns, H: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows of one head of `[tokens, H, WIDTH]` from row `start` on; zeros from `left` on."""
    mask = (rows < left)[:, None] & (columns < WIDTH)[None, :]
    place = x + start * WIDTH + (rows[:, None] * (H * WIDTH) + columns[None, :])
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def store_rows(x, values, start, rows, left, columns, H: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows as `load_rows` loads them."""
    mask = (rows < left)[:, None] & (columns < WIDTH)[None, :]
    place = x + start * WIDTH + (rows[:, None] * (H * WIDTH) + columns[None, :])
    tl.store(place, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def operands_of_sums(x, DTYPE: tl.constexpr):
    """Return fp32 x as the operands of `masked_sums`: two that sum to x, or x itself for fp32."""
    if DTYPE == tl.float32:
        return x, x
    else:
        return split(x, DTYPE)


@triton.jit
def masked_sums(mask, high, low):
    """Return the sums of rows that each row of a mask [C, C] selects; fp32."""
    ones = tl.where(mask, 1.0, 0.0).to(high.dtype)
    if high.dtype == tl.float32:
        return tl.dot(ones, high, input_precision="tf32x3")
    else:
        return tl.dot(ones, low, acc=tl.dot(ones, high))


@triton.jit
def _tokens(C: tl.constexpr):
    index = tl.arange(0, C)
    return index[:, None], index[None, :]


@triton.jit
def since_start(C: tl.constexpr):
    """Return [C, C]: whether a column's token is at or before a row's."""
    i, s = _tokens(C)
    return s <= i


@triton.jit
def until_end(C: tl.constexpr):
    """Return [C, C]: whether a column's token is after a row's."""
    i, s = _tokens(C)
    return s > i


@triton.jit
def level_tokens(h, C: tl.constexpr):
    """Return [C, C]: whether a row has the decay of a column's token at level h."""
    i, s = _tokens(C)
    is_odd = (i // h) % 2 == 1
    return (i // h == s // h) & ((is_odd & (s <= i)) | ((is_odd == 0) & (s > i)))


@triton.jit
def level_tokens_transposed(h, C: tl.constexpr):
    """Return the transposed `level_tokens`."""
    s, i = _tokens(C)
    is_odd = (i // h) % 2 == 1
    return (i // h == s // h) & ((is_odd & (s <= i)) | ((is_odd == 0) & (s > i)))


@triton.jit
def level_pairs(h, C: tl.constexpr):
    """Return [C, C]: whether a row's and a column's token form a pair of level h."""
    i, j = _tokens(C)
    return (i // (2 * h) == j // (2 * h)) & (i // h > j // h)
