"""The chunks of KDA's forward pass by the CUDA kernel: supported calls, arguments and the launch.

The kernel computes the same as `chunk_kernel` of kda_triton, from bf16 and fp16, in about 0.6 times
its time: the operands of its products stay in the registers in which they are computed.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.program import (
    DTYPES,
    FLOAT,
    INT,
    INT64,
    POINTER,
    CudaProgram,
    Variant,
    addresses,
    fields,
    serializer,
)
from fla.ops.quasar.switches import requested_backend
from fla.ops.quasar.triton_kernels.plan import Plan
from torch import Tensor

WIDTHS = (64, 128)
"""Numbers of channels of a head that the kernel supports."""
TOKENS = 64
"""Tokens of a chunk; TOKENS in kda_chunk.cu."""
CSRC = Path(__file__).with_name("csrc")
"""The folder of the kernel's source."""
_ALIGNMENT = 16  # bytes of the kernel's loads
_MAX_BLOCKS = 2**31 - 1  # of a grid


class Arguments(ctypes.Structure):
    """`quasar::kda::Arguments` of kda_chunk.cu."""

    _fields_ = [
        *fields(POINTER, "q k v g beta table reads values writes queries scores inverse decays"),
        *fields(INT64, "T length"),
        *fields(INT, "per_sequence chunks heads shared"),
        *fields(FLOAT, "scale"),
    ]


PROGRAM = CudaProgram(
    "kda",
    [CSRC / "kda_chunk.cu"],
    {"kda_chunk_{}": Arguments},
    "KDA's CUDA kernel is not used, Triton serves: %s",
)
_serialize = serializer(Arguments)


@functools.cache
def variant_for(device: int, dtype: torch.dtype, S: int) -> Variant | None:
    """Return the program's variant for heads of S channels; None for a call without the kernel."""
    if dtype not in DTYPES or S not in WIDTHS:
        return None
    return Variant(device, dtype, (f"-DQUASAR_HEAD={S}",))


def run_chunks(
    plan: Plan, inputs: tuple[Tensor, ...], chunks: tuple[Tensor | None, ...], scale: float
) -> bool:
    """Run the kernel on the current stream; return False if Triton must compute the call.

    For tensors without memory, the function only starts to compile the kernel in the background.

    Args:
        plan: has segments of multiples of 64 tokens.
        inputs: q, k, v, g and beta of `kda_triton.launch.Inputs`.
        chunks: the results to write, in the order of `kda_triton.launch.Chunks`.
    """
    v = inputs[2]
    if not (v.is_cuda or v.is_meta) or requested_backend() == "triton":
        return False
    device = torch.cuda.current_device() if v.is_meta else v.get_device()
    variant = variant_for(device, v.dtype, v.shape[3])
    if variant is None:
        return False
    if v.is_meta:
        PROGRAM.prepare(variant)
        return True
    program = PROGRAM.find_loaded(variant)
    found = None if program is None else arguments_of(plan, inputs, chunks, scale)
    if program is None or found is None:
        return False
    blocks, arguments = found
    try:
        program.kernels["kda_chunk"].launch((blocks, 1), arguments)
    except CudaUnavailableError as error:
        PROGRAM.give_up(variant, error)
        return False
    return True


def arguments_of(
    plan: Plan, inputs: tuple[Tensor, ...], chunks: tuple[Tensor | None, ...], scale: float
) -> tuple[int, bytes] | None:
    """Return a launch's blocks and arguments, or None for a tensor that is not aligned.

    The function also returns None for more blocks than a grid can have.
    """
    q, _, v, *_ = inputs
    T, H = v.shape[1:3]
    per_segment = max(1, -(-plan.longest // TOKENS))
    blocks = plan.total * per_segment * H
    places = addresses(*inputs, plan.table, *chunks)
    if blocks > _MAX_BLOCKS or any(place % _ALIGNMENT for place in places):
        return None
    sizes = T, plan.length, plan.per_sequence, per_segment, H, H // q.shape[2]
    return blocks, _serialize(*places, *sizes, scale)
