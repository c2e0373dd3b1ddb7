"""The layer's matrix products by the library, with concatenated weights and fp32 results."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fla.ops.quasar import torch_private
from fla.ops.quasar.layer.call import Weights

# from torch 2.8: fp32 results of 16-bit operands
_HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()
_16_BITS = (torch.bfloat16, torch.float16)


def concatenate_weights(weights: Weights, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the products' weights in `dtype`: q, k, v and `gate_down` as one, then others.

    The others are `gate_up`, `gate_bias` and `out`. Every call converts all of them, in one launch
    if autograd is off. A cache could be stale, because some changes of a parameter do not change
    its version (`p.data`, sharding).
    """
    first, others = weights[:4], (weights.gate_up, weights.gate_bias, weights.out)
    if torch.is_grad_enabled():
        return [torch.cat(first).to(dtype), *(p.to(dtype) for p in others)]
    sizes = [p.shape[0] for p in first]
    result = weights.q.new_empty(sum(sizes), weights.q.shape[1], dtype=dtype)
    copies = [torch.empty_like(p, dtype=dtype) for p in others]
    torch_private.copy_all([*result.split(sizes), *copies], [*first, *others])
    return [result, *copies]


def unrounded(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `rows @ weight.T` `[R, outputs]`, in fp32 if torch supports it and autograd is off.

    Args:
        rows: `[R, inputs]`, any floating dtype.
        weight: `[outputs, inputs]`, the same dtype.
    """
    if rows.dtype in _16_BITS and rows.is_cuda and _HAS_OUT_DTYPE and not torch.is_grad_enabled():
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return F.linear(rows, weight)


def product_in(rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `rows @ weight` `[R, outputs]` in `dtype`, rounded once if `unrounded` is in fp32.

    Args:
        rows: `[R, inputs]`, any floating dtype.
        weight: `[inputs, outputs]`, the same dtype.
    """
    if dtype == torch.float32 and rows.dtype in _16_BITS and rows.is_cuda and _HAS_OUT_DTYPE:
        if not torch.is_grad_enabled():
            return torch.mm(rows, weight, out_dtype=dtype)
    return torch.mm(rows, weight).to(dtype)


def over_tokens(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a^T b `[A, B]` in fp32: a weight's gradient, the sum over all tokens.

    The library splits the sum so that it fills the GPU: a 512 x 64 result of 65,536 tokens takes as
    long as reading a and b. Separate products for runs of tokens were never faster.

    Args:
        a: `[R, A]`, last stride 1.
        b: `[R, B]` of the same dtype, last stride 1.
    """
    return product_in(a.t(), b, torch.float32)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
