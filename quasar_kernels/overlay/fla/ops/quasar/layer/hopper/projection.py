"""The layer's projections, convolution and SiLU in one kernel on Hopper.

Done apart they read and write the projections three times: eight gigabytes for a million tokens.
csrc/projection.cu is the kernel; other sizes, dtypes and GPUs take a library product and the
convolution of kernels.py.
"""

from __future__ import annotations

import ctypes

import torch

from fla.ops.quasar.cuda.program import LoadedProgram, addresses, packer
from fla.ops.quasar.layer.hopper.gated_output import Packing
from fla.ops.quasar.layer.hopper.program import ProjectionArguments

HIDDEN, WIDTH, HEAD_DIM, TAPS = 512, 512, 64, 4
"""The kernel's sizes: inputs, channels of q, of k and of v, of the narrow gate, and taps."""

_WORKERS = 2  # warpgroups of a block, each with a run of tokens
_TILE = 64  # tokens that one takes at once
_LAG = 6  # products that the second begins later: half a tile's

_pack = packer(ProjectionArguments)


def projection_packings(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, narrow: torch.Tensor
) -> tuple[Packing, ...]:
    """Return how `project` wants its weights packed, one behind the other.

    Args:
        q, k, v: `[512, 512]`.
        narrow: `[64, 512]`.
    """
    wide = (Packing(weight, input_group=16) for weight in (q, k, v))
    return (*wide, Packing(narrow, row_group=32, input_group=16))


def halved_taps(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the convolution weights of q, k and v, each `[512, 1, 4]`, as `project` wants them.

    That is `[4, 1536]` in fp32, halved: silu(x) = h + h tanh(h) with h = x / 2.
    """
    joined = torch.cat(weights).squeeze(1)
    taps = joined.new_empty(TAPS, joined.shape[0], dtype=torch.float32)
    return torch.mul(joined.t(), 0.5, out=taps)


def _steps(tokens: int, runs: int) -> int:
    # runs overlap by the rows that the convolution needs before its first
    before = TAPS - 1
    return max(1, -(-(-(-(tokens - before) // runs) + before) // _TILE))


def project(
    program: LoadedProgram,
    x: torch.Tensor,
    images: torch.Tensor,
    taps: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return silu(causal convolution(x W^T)) for q, k and v, and x W^T for the narrow gate.

    It records nothing for autograd, and runs on the current stream of x's device, which is the
    current one.

    Args:
        program: the kernels for x's device and `dtype`.
        x: `[T, 512]` fp32 contiguous, 16-byte aligned; T tokens of one sequence, from its start.
        images: q's, by `pack_weights(projection_packings(...), dtype)`; the others follow it.
        taps: by `halved_taps`.
        dtype: bf16 or fp16; x is rounded to it. Products, taps and the convolution's sums are fp16
            in both, and saturate at 65504.

    Returns:
        `[T, 1536]`, q, k and v side by side, and `[T, 64]`, both in `dtype`. SiLU is computed
        in fp32.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    T = x.shape[0]
    qkv = x.new_empty(T, 3 * WIDTH, dtype=dtype)
    narrow = x.new_empty(T, HEAD_DIM, dtype=dtype)
    if T:
        blocks = program.multiprocessors // 2 * 2  # in pairs
        places = addresses(x, taps, images, qkv, narrow)
        packed = _pack(*places, T, _steps(T, _WORKERS * blocks), _LAG)
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        program.kernels["projection"].launch((blocks, 1), (ctypes.c_char_p * 1)(packed), stream)
    return qkv, narrow


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
