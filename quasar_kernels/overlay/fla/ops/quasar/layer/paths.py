"""Which kernels compute a call of the layer: the only place that chooses.

The table in docs/layer-calls.md shows the result for each kind of call. `hopper`, `wide`,
`portable` and `library` are modules with the same functions `project` and `output`; all but
`library` also have `find_program`.
"""

from __future__ import annotations

import operator
from types import ModuleType
from typing import NamedTuple

import torch

from fla.ops.quasar.backend import MAX_HEAD_DIM
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.program import LoadedProgram
from fla.ops.quasar.layer import hopper, library, portable, wide
from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.layer.kernels import CONV_TAPS
from fla.ops.quasar.layer.weight_tiles import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    SOURCE_TYPES,
    TAPS,
    WIDTH,
    present,
)

MIN_TOKENS = 1 << 9
"""Minimum mean length of a call's sequences for the fused kernels; below, an H200 is slower."""
MIN_WIDE_TILES = 264
"""Minimum number of tiles for wide.py: two for each SM of an H200. Compared with a library product
on an H100, the forward pass with 264 tiles is as fast (2,048 channels) or 10% faster (768 and 1,024
channels). With 180 tiles it is 3% slower or 10% faster."""

MMA_SYNC = (8, 12)
"""Major compute capabilities of GPUs with no faster products than `mma.sync`. By
docs/results/estimates.md, portable.py is faster than library products on these GPUs only."""

_SHAPES = (  # of the weights of the layer for which hopper.py and portable.py are written
    *[(WIDTH, HIDDEN)] * 3,
    (HEAD_DIM, HIDDEN),
    (WIDTH, HEAD_DIM),
    (WIDTH,),
    *[(WIDTH, 1, TAPS)] * 3,
    (HEADS,),
    (HEAD_DIM,),
    (HIDDEN, WIDTH),
)
_DTYPES = set(SOURCE_TYPES)
_dtype, _shape = operator.attrgetter("dtype"), operator.attrgetter("shape")


class Path(NamedTuple):
    """The kernels around the operator."""

    kernels: ModuleType
    program: LoadedProgram | None  # of `kernels.PROGRAM`; None for library.py

    def failed(self, error: CudaUnavailableError, call: Call) -> None:
        """Disable these kernels after a failed launch, and log the first failure.

        Raises:
            CudaUnavailableError: QUASAR_BACKEND is `cuda`.
        """
        if call.backend == "cuda" or self.program is None:
            raise error
        self.kernels.PROGRAM.give_up(self.program.variant, error)


def choose(call: Call, x: torch.Tensor, weights: Weights) -> Path | None:
    """Return the kernels of a call; None for `layer_with_states` of library.py.

    Within `LayerFunction`'s passes gradients are off, so training uses the same kernels.
    """
    if not supports_kernels(call, x, weights):
        return None
    if call.dtype.itemsize == 2 and call.backend != "triton" and not torch.is_grad_enabled():
        fits = fits_512(call, x, weights)
        if fits and (program := hopper.find_program(x, call.dtype)):
            return Path(hopper, program)
        if fits_wide(call, x, weights) and (program := wide.find_program(x, call.dtype)):
            return Path(wide, program)
        if fits and (call.backend == "cuda" or portable_is_faster(x)):
            if program := portable.find_program(x, call.dtype):
                return Path(portable, program)
    return Path(library, None)


def portable_is_faster(x: torch.Tensor) -> bool:
    """Return whether x's GPU runs portable.py faster than library.py."""
    return torch.cuda.get_device_capability(x.device)[0] in MMA_SYNC


def supports_kernels(call: Call, x: torch.Tensor, weights: Weights) -> bool:
    """Return whether the layer's own kernels, around the operator, support a call."""
    taps = weights.q_taps
    return (
        x.is_cuda
        and call.dtype != torch.float64
        and call.head_dim <= MAX_HEAD_DIM
        and taps is not None
        and taps.shape[-1] == CONV_TAPS
        and call.backend != "torch"
        and not call.recurrent
    )


def fits_512(call: Call, x: torch.Tensor, weights: Weights) -> bool:
    """Return whether hopper.py and portable.py support a call, and are faster than the others."""
    if not x.is_cuda or x.dtype not in _DTYPES:
        return False
    if not x.is_contiguous() or x.data_ptr() % 16:
        return False
    sequences = x.shape[0] if call.cu_seqlens is None else call.sequences(x)
    if x.shape[0] * x.shape[1] < MIN_TOKENS * max(1, sequences):
        return False
    existing = present(weights)
    return (
        tuple(map(_shape, existing)) == _SHAPES
        and _DTYPES.issuperset(map(_dtype, existing))
        and all(map(torch.Tensor.is_contiguous, existing))
        and set(map(torch.Tensor.get_device, existing)) == {x.get_device()}
    )


def fits_wide(call: Call, x: torch.Tensor, weights: Weights) -> bool:
    """Return whether wide.py supports a call and is probably faster than a library product."""
    if not x.is_contiguous() or x.data_ptr() % 16:  # for the tensor map
        return False
    hidden, channels = x.shape[-1], 3 * call.heads * call.head_dim
    tokens = x.numel() // max(1, hidden)
    if tokens < MIN_TOKENS * max(1, call.sequences(x)):
        return False
    return (
        hidden % 64 == channels % wide.COLUMNS == 0
        and call.head_dim in (64, 128)
        and weights.q_shift is None
        and -(-tokens // wide.TOKENS) * (channels // wide.COLUMNS) >= MIN_WIDE_TILES
        and all(map(torch.Tensor.is_contiguous, present(weights)))
    )


def choose_products(
    call: Call, x: torch.Tensor, weights: Weights, options: tuple[str, ...] = ()
) -> Path:
    """Return the kernels that compute products for a backward pass; `options` are wide.py's.

    They are not those of the forward pass: hopper.py and portable.py return no products.
    """
    if call.dtype.itemsize == 2 and call.backend in ("auto", "cuda"):
        if fits_wide(call, x, weights):
            if program := wide.find_program(x, call.dtype, options):
                return Path(wide, program)
    return Path(library, None)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
