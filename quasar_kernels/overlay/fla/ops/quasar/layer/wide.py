"""The projections, convolution and SiLU of a layer of any width in one kernel on Hopper.

A library product and a separate convolution write the products to memory and read them again. The
kernel csrc/hopper/wide_projection.cu keeps them on chip. On an H200 the layer's forward pass takes
a sixth less time at 2,048 channels and an eighth less at 1,024. The output stage is library.py's.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from fla.ops.quasar.cuda.driver import PARAMETERS, tensor_map
from fla.ops.quasar.cuda.program import (
    INT,
    INT64,
    POINTER,
    CudaProgram,
    LoadedProgram,
    Variant,
    addresses,
    fields,
    serializer,
)
from fla.ops.quasar.layer.call import Call, Projected, Weights
from fla.ops.quasar.layer.first_tokens import replace_first_tokens
from fla.ops.quasar.layer.hopper import is_hopper
from fla.ops.quasar.layer.library import output, output_weights
from fla.ops.quasar.layer.products import concatenate_weights
from fla.ops.quasar.layer.weight_tiles import CSRC

__all__ = ["find_program", "output", "project"]  # as each module that paths.py chooses

COLUMNS = 256
"""Channels of a tile; q, k and v together must have a multiple of this."""
TOKENS = 125
"""Tokens of a tile; its other three rows are the tokens before them."""
FP16_RESULTS = ("-DQUASAR_FP16_RESULTS",)
"""NVRTC's option for q, k, v and their products in fp16, whatever the dtype of x."""
_ROWS = 128  # of a tensor map's box, which has 64 inputs
_CLUSTER = 2  # blocks, each with its own tokens


class WideArguments(ctypes.Structure):
    """`quasar::layer::WideArguments` of wide_projection.cu."""

    _fields_ = [
        *fields(POINTER, "taps qkv narrow products"),
        *fields(INT64, "tokens"),
        *fields(INT, "inputs channels narrow_width pairs"),
    ]


PROGRAM = CudaProgram(
    "wide_projection",
    [CSRC / "hopper" / "wide_projection.cu"],
    {"wide_projection_{}": WideArguments},
    "the fused projections of wide layers are not used: %s",
)
_serialize = serializer(WideArguments)


def find_program(
    x: torch.Tensor, dtype: torch.dtype, options: tuple[str, ...] = ()
) -> LoadedProgram | None:
    """Return the kernel for products in `dtype` on x's device, or None if it is not used.

    `options` are `FP16_RESULTS` or none.
    """
    return PROGRAM.find_loaded(Variant(x.device.index, dtype, options)) if is_hopper(x) else None


@functools.lru_cache(256)
def _maps(x: int, weights: int, tokens: int, inputs: int, outputs: int) -> bytes:
    box = (64, _ROWS)
    return b"".join(
        tensor_map(address, (inputs, rows), (inputs,), box)
        for address, rows in ((x, tokens), (weights, outputs))
    )


def project_wide(
    program: LoadedProgram,
    rows: torch.Tensor,
    weights: torch.Tensor,
    taps: torch.Tensor,
    keep: bool,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return silu(causal convolution(x W^T)) for q, k and v, `narrow`, and the products of q, k, v.

    `narrow` is the gate's product. The kernel records nothing for autograd and runs on the
    current stream. The device of `rows` must be the current device.

    Args:
        program: the kernel for the device and dtype of `rows`.
        rows: x, `[T, inputs]` bf16 or fp16, contiguous, 16-byte aligned, treated as one
            sequence; inputs are a multiple of 64.
        weights: `[C + S, inputs]` in the same dtype, contiguous; C is a multiple of 256, S 64 or
            128.
        taps: `[C, 4]` fp32, contiguous.
        keep: whether to return the products of q, k and v; otherwise they are None.
        into: contiguous tensors for the results, or None for new ones.

    Returns:
        `[T, C]`, `[T, S]` and `[T, C]` in the dtype of `rows`, or the first and the last in fp16 by
        a program with `FP16_RESULTS`. All products and taps are first rounded to fp16 and saturate
        at 65504. The convolution's sums are fp16, SiLU is fp32.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    (T, inputs), C = rows.shape, taps.shape[0]
    S = weights.shape[0] - C
    dtype = torch.float16 if program.variant.options == FP16_RESULTS else rows.dtype
    if into is None:
        qkv, narrow = rows.new_empty(T, C, dtype=dtype), rows.new_empty(T, S)
        products = torch.empty_like(qkv) if keep else None
    else:
        qkv, narrow, products = into
    if T:
        pairs = -(-T // (_CLUSTER * TOKENS))
        clusters = min(program.multiprocessors // _CLUSTER, pairs * (C // COLUMNS + 1))
        arguments = _serialize(*addresses(taps, qkv, narrow, products), T, inputs, C, S, pairs)
        maps = _maps(*addresses(rows, weights), T, inputs, C + S)
        parameters = PARAMETERS(arguments, maps)
        program.kernels["wide_projection"].launch((_CLUSTER * clusters, 1), parameters)
    return qkv, narrow, products


def project(
    program: LoadedProgram,
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    save: bool,
    save_products: bool,
) -> Projected:
    """Compute everything before the operator; arguments as those of `library.project`.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    projections, *others = concatenate_weights(weights, call.dtype)
    rows = x.reshape(-1, x.shape[-1]).to(call.dtype)
    taps, _ = weights.joined_taps()
    qkv, narrow, products = project_wide(
        program, rows, projections, taps.float().contiguous(), save_products
    )
    if (count := call.sequences(x)) > 1:
        replace_first_tokens(rows, weights, call.cu_seqlens, count, qkv)
    beta = torch.nn.functional.softplus(weights.beta_log.float())
    last = output_weights(weights, others)
    return Projected(qkv, beta, narrow, last, rows if save else None, products)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
