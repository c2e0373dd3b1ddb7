"""WKV6 by the CUDA kernels: their arguments, launches, and autograd."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.program import (
    DTYPES,
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
from fla.ops.quasar.device import is_recorded, on_its_device
from torch import Tensor

from quasar_kernels.blocks.autograd import Forward, Kernels, KernelsFunction

WIDTHS = (32, 64, 128)
"""Numbers of channels of r, k and w that the kernels support."""
COLUMNS = 32
"""The channels of v are a multiple of this."""
CHECKPOINT = 8
"""Tokens between the states that are kept for the gradients: CHECKPOINT in walk.cuh."""
CSRC = Path(__file__).with_name("csrc")
"""The folder of the kernels' sources."""
_ALIGNMENT = 16  # the kernels copy 16 bytes at a time


TENSORS = (
    *("r", "k", "v", "dout", "w", "u", "initial_state", "d_final", "o", "dv", "final_state"),
    *("checkpoints", "dr", "dk", "dw", "du", "d_initial", "bounds"),
)


class Arguments(ctypes.Structure):
    """`quasar::wkv6::Arguments` of walk.cuh."""

    _fields_ = [
        *fields(POINTER, " ".join(TENSORS)),
        *fields(INT64, "T"),
        *fields(INT, "heads values"),
    ]


class _Program(CudaProgram):  # type: ignore[misc] # mypy does not resolve the name
    def give_up(self, variant: Variant, error: CudaUnavailableError) -> None:
        """Stop using the variant; the operator then uses other kernels and logs the cause."""
        self._entries[variant] = error


PROGRAM = _Program(
    "wkv6",
    [CSRC / "wkv6_forward.cu", CSRC / "wkv6_backward.cu"],
    {"wkv6_forward": Arguments, "wkv6_backward": Arguments},
    "",
)
_serialize = serializer(Arguments)


class Inputs(NamedTuple):
    """A call's tensors, all contiguous and aligned."""

    r: Tensor  # [B, T, H, K]
    k: Tensor  # the same
    v: Tensor  # [B, T, H, V] in the same dtype
    w: Tensor  # [B, T, H, K] fp32
    u: Tensor  # [H, K] fp32


@functools.cache
def variant_for(device: int, dtype: torch.dtype, K: int) -> Variant:
    """Return the variant with which the kernels are compiled; in fp32 its dtype has no effect."""
    width = f"-DWKV6_KEYS={K}"
    if dtype == torch.float32:
        return Variant(device, torch.bfloat16, (width, "-DWKV6_FP32=1"))
    return Variant(device, dtype, (width,))


def reason_against(r: Tensor, v: Tensor) -> str | None:
    """Return why the kernels do not support r `[B, T, H, K]` and v `[B, T, H, V]`, or None."""
    if v.dtype not in (*DTYPES, torch.float32):
        return f"the tensors must be bf16, fp16 or fp32; v is {v.dtype}"
    if r.shape[-1] not in WIDTHS:
        widths = ", ".join(map(str, WIDTHS))
        return f"heads of r and k must have one of {widths} channels; they have {r.shape[-1]}"
    if v.shape[-1] % COLUMNS:
        return f"heads of v must have a multiple of {COLUMNS} channels; they have {v.shape[-1]}"
    return None


def prepared(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x, or a copy that is contiguous, aligned and has the dtype."""
    x = x.to(dtype).contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


class Plan(NamedTuple):
    """The kernels of a call, and the bounds `[N + 1]` int64 of packed sequences or None."""

    program: LoadedProgram
    bounds: Tensor | None


def _launch(plan: Plan, name: str, x: Inputs, columns: int, **tensors: Tensor | None) -> None:
    """Launch the kernel `name`; those of TENSORS that are not given are None."""
    program, bounds = plan
    B, T, H, V = x.v.shape
    tensors |= x._asdict() | {"bounds": bounds}
    places = addresses(*(tensors.get(name) for name in TENSORS))
    grid = (B if bounds is None else bounds.numel() - 1) * H, V // columns
    program.kernels[name].launch(grid, _serialize(*places, T, H, V))


def forward(
    plan: Plan,
    x: Inputs,
    initial_state: Tensor | None,
    keep: bool,
    final_state: Tensor | None = None,
) -> Forward:
    """Launch the forward pass on the current stream.

    Args:
        x: the inputs.
        initial_state: `[N, H, K, V]` fp32 contiguous, or None for zero.
        keep: whether to store checkpoints for the gradients.
        final_state: the tensor to write; it may be `initial_state`. None allocates a new one.

    Returns:
        The results; the checkpoints are the states before every CHECKPOINT tokens,
        `[cells, H, K, V]`.
    """
    B, T, H, K = x.r.shape
    bounds = plan.bounds
    V = x.v.shape[-1]
    N = B if bounds is None else bounds.numel() - 1
    o = torch.empty_like(x.v)
    if final_state is None:
        final_state = x.u.new_empty(N, H, K, V)
    kept = x.u.new_empty(B * T // CHECKPOINT + N + 1, H, K, V) if keep else None
    columns = 1024 // K  # COLUMNS in wkv6_forward.cu
    results = {"o": o, "final_state": final_state, "checkpoints": kept}
    _launch(plan, "wkv6_forward", x, columns, initial_state=initial_state, **results)
    return Forward(o, final_state, kept)


def backward(
    plan: Plan, x: Inputs, kept: Tensor, do: Tensor, d_final: Tensor | None, initial: bool
) -> tuple[Inputs, Tensor | None]:
    """Return the gradients of the inputs, in their dtypes, and of the initial state, if any.

    do and d_final are the gradients of the results; their alignment does not matter.
    """
    do = prepared(do, x.v.dtype)
    last = None if d_final is None else prepared(d_final, torch.float32)
    bounds = plan.bounds
    H, K = x.u.shape
    V = x.v.shape[-1]
    columns = 16 if K == 128 else COLUMNS  # COLUMNS in wkv6_backward.cu
    parts, N = V // columns, x.r.shape[0] if bounds is None else bounds.numel() - 1
    dr, dk, dw = (x.u.new_empty(parts, *x.r.shape) for _ in range(3))
    dv, du = torch.empty_like(x.v), x.u.new_empty(parts * N, H, K)
    d_initial = x.u.new_empty(N, H, K, V) if initial else None
    operands = {"dout": do, "d_final": last, "checkpoints": kept}
    results = {"dr": dr, "dk": dk, "dv": dv, "dw": dw, "du": du, "d_initial": d_initial}
    _launch(plan, "wkv6_backward", x, columns, **operands, **results)
    dtype = x.r.dtype
    sums = Inputs(dr.sum(0).to(dtype), dk.sum(0).to(dtype), dv, dw.sum(0), du.sum(0))
    return sums, d_initial


KERNELS = Kernels(Inputs, forward, backward)


@torch.compiler.disable
@on_its_device
def wkv6_cuda(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Apply WKV6 token by token in CUDA C++ on a GPU, differentiably.

    Tensors and results are those of `blocks.wkv6.wkv6`, without fp64.

    Products and states are fp32, and a call is one launch. The host never waits for the GPU, so
    `cu_seqlens` is not checked. For gradients, the state before every 8 tokens is kept in fp32.

    Args:
        in_place: write the final state over `initial_state`, which is fp32, contiguous and not
            recorded by autograd.

    Raises:
        ValueError: the kernels do not support these tensors, or `in_place` is set and the initial
            state cannot be overwritten.
        CudaUnavailableError: the kernels cannot be compiled, loaded or launched.
    """
    problem = reason_against(r, v)
    if problem is not None:
        raise ValueError(f"WKV6's CUDA kernels do not support this call: {problem}")
    dtype, single = v.dtype, torch.float32
    operands = (prepared(x, dtype) for x in (r, k, v))
    inputs = Inputs(*operands, *(prepared(x, single) for x in (w, u)))
    state = None if initial_state is None else prepared(initial_state, single)
    recorded = is_recorded(*inputs, state)
    bounds = None
    if cu_seqlens is not None:  # the backward pass reads a copy, which the caller cannot change
        bounds = cu_seqlens.to(v.device, torch.int64, copy=recorded).contiguous()
    if in_place and (recorded or state is None or state is not initial_state):
        raise ValueError(
            "in_place needs an initial_state that is fp32, contiguous, aligned to 16 bytes and "
            "not recorded: pass such a state, or in_place=False"
        )
    plan = Plan(PROGRAM.load(variant_for(v.device.index, dtype, r.shape[-1])), bounds)
    if not recorded:
        o, final, _ = forward(plan, inputs, state, False, state if in_place else None)
        return o, final
    results: tuple[Tensor, Tensor] = KernelsFunction.apply(KERNELS, plan, state, *inputs)
    return results
