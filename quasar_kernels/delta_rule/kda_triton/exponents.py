"""Device functions of KDA: decays between the tokens of a chunk, as factors of at most 1.

The product of tokens i and j < i of a chunk has, in each channel, the decay of the tokens after j
until i. It is a factor of i's row times a factor of j's row, relative to a token in between. The
pairs are therefore divided into levels. At level h (1, 2, 4, ..., half a chunk), tokens form blocks
of h; i is in an odd block and j in the even block before it. The row of i has the decay since its
block's start, and j's row the decay until its block's end. A token has one role at a level, so one
set of factors is enough for both. All exponents are sums of log decays of the same sign, and never
differences, so weak decays next to strong ones keep their digits.

A chunk consists of groups of GROUP tokens. Within the groups, sums are products with matrices of
zeros and ones, and levels below GROUP need products of groups with themselves only. From level
GROUP on, an exponent is a sum within the token's group plus the sums of whole groups.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fla.ops.quasar.triton_kernels.device_functions import split

CUT = tl.constexpr(-160.0)
"""Exponents of 2 are raised to this, for which fp32 gives 0: sums of -inf would give NaN."""
LOG2E = tl.constexpr(1.4426950408889634)
GROUP = tl.constexpr(16)
"""Tokens of a group: the fewest rows of a product."""


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
def grouped(x):
    """Return rows x [C, columns] by groups, [C / 16, 16, columns]."""
    return tl.reshape(x, [x.shape[0] // GROUP, GROUP, x.shape[1]])


@triton.jit
def rows_of(x):
    """Return rows of groups, [C / 16, 16, columns], as [C, columns]."""
    return tl.reshape(x, [x.shape[0] * GROUP, x.shape[2]])


@triton.jit
def diagonal_of(x):
    """Return the blocks [C / 16, 16, 16] on the diagonal of x [C, C], in fp32."""
    N: tl.constexpr = x.shape[0] // GROUP
    x = tl.reshape(x.to(tl.float32), [N, GROUP, N, GROUP])
    return tl.sum(tl.where(_is_own_group(N), x, 0.0), axis=2)


@triton.jit
def from_diagonal(x):
    """Return [C, C] with the blocks x [C / 16, 16, 16] on its diagonal and zeros elsewhere."""
    N: tl.constexpr = x.shape[0]
    return tl.reshape(tl.where(_is_own_group(N), x[:, :, None, :], 0.0), [N * GROUP, N * GROUP])


@triton.jit
def _is_own_group(N: tl.constexpr):
    n = tl.arange(0, N)
    return n[:, None, None, None] == n[None, None, :, None]


@triton.jit
def exponents(g):
    """Return the exponents of 2 of log decays."""
    return tl.maximum(g * LOG2E, CUT)


@triton.jit
def summand(x, DTYPE: tl.constexpr):
    """Return exponents as an operand of `masked_sums`: fp16, unless the call is in fp32.

    An exponent of -x is rounded by x 2^-12, which changes its factor by at most 1e-4.
    """
    return x.to(tl.float32 if DTYPE == tl.float32 else tl.float16)


@triton.jit
def masked_sums(mask, x):
    """Return the sums of rows that each row of a mask selects; fp32.

    The mask is [C, C] for rows [C, columns], and [16, 16] for groups.
    """
    ones = _ones(mask, x)
    return tl.dot(ones, x, input_precision="tf32x3")


@triton.jit
def exact_sums(mask, x, DTYPE: tl.constexpr):
    """Return `masked_sums` of fp32 x to fp32's digits."""
    if DTYPE == tl.float32:
        return masked_sums(mask, x)
    else:
        high, low = split(x, DTYPE)
        ones = _ones(mask, high)
        return tl.dot(ones, low, acc=tl.dot(ones, high))


@triton.jit
def _ones(mask, x):
    if len(x.shape) == 3:
        mask = tl.broadcast_to(mask[None, :, :], [x.shape[0], GROUP, GROUP])
    one, zero = tl.full([], 1.0, x.dtype), tl.full([], 0.0, x.dtype)
    return tl.where(mask, one, zero)  # a conversion would cost as much as the product


@triton.jit
def since_start(C: tl.constexpr):
    """Return [C, C]: whether a column's token is at or before a row's."""
    i, s = _indices(C)
    return s <= i


@triton.jit
def until_end(C: tl.constexpr):
    """Return [C, C]: whether a column's token is after a row's."""
    i, s = _indices(C)
    return s > i


@triton.jit
def _indices(C: tl.constexpr):
    index = tl.arange(0, C)
    return index[:, None], index[None, :]


@triton.jit
def level_tokens(level, C: tl.constexpr):
    """Return [C, C]: whether a row has the decay of a column's token at level h = 2^level."""
    i, s = _indices(C)
    return (i >> level == s >> level) & (((i >> level) % 2 == 1) == (s <= i))


@triton.jit
def level_tokens_transposed(level, C: tl.constexpr):
    """Return the transposed `level_tokens`."""
    s, i = _indices(C)
    return (i >> level == s >> level) & (((i >> level) % 2 == 1) == (s <= i))


@triton.jit
def level_pairs(level, C: tl.constexpr, shift=0):
    """Return [C, C]: whether a row's and a column's token form a pair of level h = 2^level.

    A shift of both tokens by a multiple of C does not change the result. If it depends on a loop's
    variable, the compiler does not keep the pairs in registers during the loop.
    """
    i, j = _indices(C)
    i, j = (i + shift) >> level, (j + shift) >> level
    return (i >> 1 == j >> 1) & (i > j)
