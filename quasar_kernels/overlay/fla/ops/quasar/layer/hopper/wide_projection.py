"""The projections, convolution and SiLU of a layer of any width in one kernel on Hopper.

A library product and a separate convolution write the products to memory and read them again. This
kernel (csrc/wide_projection.cu) keeps them on chip. On an H200 the layer's forward pass takes a
sixth less time at 2,048 channels and an eighth less at 1,024. The output stage is library.py's.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda.driver import tensor_map
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
from fla.ops.quasar.layer.call import Activations, Call, Stages, Weights
from fla.ops.quasar.layer.first_tokens import replace_first_tokens
from fla.ops.quasar.layer.fused import FEWEST_TOKENS
from fla.ops.quasar.layer.hopper.program import CSRC, is_hopper
from fla.ops.quasar.layer.library import LIBRARY, activations
from fla.ops.quasar.layer.products import concatenate_weights

COLUMNS = 256
"""Channels of a tile; q, k and v together must have a multiple of this."""
TOKENS = 125
"""Tokens of a tile; its other three rows are the tokens before them."""
FEWEST_TILES = 264
"""Least tiles with which the kernel is used: two for each SM of an H200. On an H100 the forward
pass with 264 tiles is as fast as with a library product (2,048 channels) or 10% faster (768 and
1,024 channels); with 180 tiles it is 3% slower or 10% faster."""

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
    [CSRC / "wide_projection.cu"],
    {"wide_projection_{}": WideArguments},
    "the fused projections of wide layers are not used: %s",
)
_serialize = serializer(WideArguments)


def takes(call: Call, x: torch.Tensor, weights: Weights) -> bool:
    """Return whether the kernel supports a call and is probably faster than a library product."""
    if not x.is_contiguous() or x.data_ptr() % 16:  # for the tensor map
        return False
    if call.dtype.itemsize != 2 or call.backend not in ("auto", "cuda") or not is_hopper(x):
        return False
    hidden, channels = x.shape[-1], 3 * call.heads * call.head_dim
    tokens = x.numel() // max(1, hidden)
    if tokens < FEWEST_TOKENS * max(1, call.sequences(x)):
        return False
    return (
        hidden % 64 == channels % COLUMNS == 0
        and call.head_dim in (64, 128)
        and weights.q_shift is None
        and -(-tokens // TOKENS) * (channels // COLUMNS) >= FEWEST_TILES
        and all(w is None or w.is_contiguous() for w in weights)
        and not torch.is_grad_enabled()
    )


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return silu(causal convolution(x W^T)) for q, k and v, and two kinds of products x W^T.

    The latter are those of the gate's low-rank input, and those of q, k and v before the
    convolution. It records nothing for autograd and runs on the current stream. The device of
    `rows` must be the current device.

    Args:
        program: the kernel for the device and dtype of `rows`.
        rows: x, `[T, inputs]` bf16 or fp16, contiguous, 16-byte aligned, treated as one
            sequence; inputs are a multiple of 64.
        weights: `[C + S, inputs]` in the same dtype, contiguous; C is a multiple of 256, S 64 or
            128.
        taps: `[C, 4]` fp32, contiguous.
        keep: whether to return the products of q, k and v; otherwise they are None.

    Returns:
        `[T, C]`, `[T, S]` and `[T, C]` in the dtype of `rows`. All products and taps are first
        rounded to fp16 and saturate at 65504. The convolution's sums are fp16, SiLU is fp32.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    (T, inputs), C = rows.shape, taps.shape[0]
    S = weights.shape[0] - C
    qkv, narrow = rows.new_empty(T, C), rows.new_empty(T, S)
    products = rows.new_empty(T, C) if keep else None
    if T:
        pairs = -(-T // (_CLUSTER * TOKENS))
        clusters = min(program.multiprocessors // _CLUSTER, pairs * (C // COLUMNS + 1))
        arguments = _serialize(*addresses(taps, qkv, narrow, products), T, inputs, C, S, pairs)
        maps = _maps(*addresses(rows, weights), T, inputs, C + S)
        stream = torch_private.raw_stream(rows.device.index)
        program.kernels["wide_projection"].launch(
            (_CLUSTER * clusters, 1), (ctypes.c_char_p * 2)(arguments, maps), stream
        )
    return qkv, narrow, products


def _project(
    call: Call, x: torch.Tensor, weights: Weights, keep: bool, output: bool
) -> Activations | None:
    if not takes(call, x, weights):
        return None
    program = PROGRAM.find_loaded(Variant(x.device.index, call.dtype))
    if program is None:
        return None
    return PROGRAM.attempt(call.backend, program, _launch, call, x, weights, keep, output)


def _launch(
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    keep: bool,
    output: bool,
    *,
    program: LoadedProgram,
) -> Activations:
    B, T, D = x.shape
    projections, *others = concatenate_weights(weights, call.dtype)
    rows = x.reshape(B * T, D).to(call.dtype)
    taps, _ = weights.joined_taps()
    qkv, narrow, products = project_wide(
        program, rows, projections, taps.float().contiguous(), keep and output
    )
    count, bounds = call.sequences(x), call.cu_seqlens
    if count > 1:
        bounds = None if bounds is None else bounds.to(x.device)
        replace_first_tokens(rows, weights, bounds, count, qkv)
    return activations(call, weights, others, qkv, narrow, rows if keep else None, products, B)


def recompute_products(
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    rows: torch.Tensor,
    projections: torch.Tensor,
) -> torch.Tensor | None:
    """Return the products of q, k and v, bit for bit those that the forward pass can save.

    Args:
        call, x, weights: the layer's call.
        rows: x in the products' dtype, `[R, hidden]`.
        projections: the first result of `concatenate_weights`.

    Returns:
        `[R, 3 H S]`, or None if the kernel does not compute the call.
    """
    if not takes(call, x, weights):
        return None
    program = PROGRAM.find_loaded(Variant(x.device.index, call.dtype))
    if program is None:
        return None

    def project_rows(*, program: LoadedProgram) -> torch.Tensor | None:
        taps = weights.joined_taps()[0].float().contiguous()
        return project_wide(program, rows, projections, taps, keep=True)[2]

    return PROGRAM.attempt(call.backend, program, project_rows)


WIDE = Stages(_project, LIBRARY.output)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
