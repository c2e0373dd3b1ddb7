"""Chooses a `chunk_quasar` call's implementation (CUDA C++, Triton or torch), and runs the kernels.

QUASAR_BACKEND has four values. `auto` (the default) takes the first of CUDA C++, Triton and torch
that supports the call. `cuda` raises for calls that Triton would compute, so that Triton is not
measured by mistake. `triton` takes Triton if it supports the call, otherwise torch. `torch` takes
torch for all calls. When the CUDA kernels cannot be built or run, `auto` logs one line with the
cause and the remedy, and uses Triton from then on.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from fla.ops.quasar import switches
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.program import DTYPES, LoadedProgram
from fla.ops.quasar.cuda.scan import scan_backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.operator_types import Gradients, Saved, Scan, ScanInputs, StepSizes
from fla.ops.quasar.segments import Segments
from fla.ops.quasar.triton_kernels import passes as triton_passes
from fla.ops.quasar.triton_kernels.plan import plan_of


MIN_LOG_DECAY = -110.0
"""The kernels receive lower log decays as this one: exp of it is 0 in fp32, its sums are finite."""
MAX_HEAD_DIM = 128
"""Widest head that the Triton kernels hold in registers; torch computes wider heads."""


def has_kernels(q: torch.Tensor) -> bool:
    """Return whether Triton's kernels support a call with this q; otherwise only torch does."""
    return q.is_cuda and q.shape[-1] <= MAX_HEAD_DIM and q.dtype != torch.float64


class Choice(NamedTuple):
    """The implementation of a call, and why it was chosen."""

    backend: Literal["cuda", "triton", "torch"]
    reason: str  # a clause
    remedy: str = ""  # how to enable a faster implementation, if known
    program: LoadedProgram | None = None  # the CUDA kernels, if they are used


def choose_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Choice:
    """Return the implementation of `chunk_quasar` for q, k, v `[B, T, H, S]`, and the reason.

    If the CUDA kernels support the call, the first call for a device, dtype and head width compiles
    them or reads them from the cache.

    Raises:
        ValueError: the value of QUASAR_BACKEND is unknown.
        CudaUnavailableError: QUASAR_BACKEND is `cuda`, and Triton would compute the call, because
            the CUDA kernels do not support it or cannot be built.
    """
    name = switches.requested_backend()
    if name == "torch" or has_kernels(q):
        return _choose(name, q, k, v)
    reason = f"no kernels support heads of {q.shape[-1]} channels in {q.dtype}"
    return Choice("torch", reason if q.is_cuda else "the tensors are not on a GPU")


def _choose(
    name: switches.Backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: tuple[str, ...] = (),
) -> Choice:
    remedy = ""
    if name in ("torch", "triton"):
        return Choice(name, f"{switches.BACKEND}={name}")
    reason = cuda_scan.reason_against(q, k, v)
    if reason is None:
        _, _, H, S = v.shape
        variant = cuda_scan.variant_for(v.device.index, v.dtype, H, S, options)
        program = cuda_scan.PROGRAM.find(variant)
        if isinstance(program, LoadedProgram):
            return Choice("cuda", "the CUDA kernels take this call", program=program)
        reason, remedy = program.problem, program.remedy
    if name == "cuda":
        remedy = f"{remedy}, or " if remedy else ""
        raise CudaUnavailableError(
            f"{switches.BACKEND}=cuda, but {reason}", f"{remedy}set {switches.BACKEND}=auto"
        )
    return Choice("triton", reason, remedy)


def scan_forward(
    inputs: ScanInputs,
    output_final_state: bool = False,
    *,
    backend: switches.Backend,
    training: bool = False,
    every: int | None = None,
) -> Scan:
    """Run the forward pass by kernels: CUDA C++ if it supports the call, otherwise Triton.

    Args:
        inputs: of any dtypes and strides; q's device must be the current one.
        output_final_state: whether to return the state after each sequence.
        backend: the value of QUASAR_BACKEND.
        training: whether a backward pass follows. If Triton computes the call, its
            kernels are then compiled, too.
        every: n, a multiple of 128, if a segment must end after every n tokens; otherwise None.

    Raises:
        CudaUnavailableError: `backend` is `cuda`, and the CUDA kernels do not support the call,
            cannot be built, or fail to launch.
    """
    inputs = kernel_inputs(inputs)
    program = cuda_program(inputs, backend)
    if program is not None:
        try:
            return cuda_scan.forward(inputs, output_final_state, every=every, program=program)
        except CudaUnavailableError as error:
            cuda_scan.PROGRAM.failed(backend, program.variant, error)
    return triton_passes.forward(inputs, output_final_state, training=training, every=every)


def kernel_inputs(inputs: ScanInputs) -> ScanInputs:
    """Return the inputs in the dtypes and strides that the kernels take."""
    q, k, v, (steps, per_token), initial, cu_seqlens, scale, g = inputs
    # the kernels take any batch, token and head stride, so slices of a wider tensor need no copy
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 or {k.dtype, v.dtype} != {q.dtype}:
        rows = [x.to(q.dtype) for x in (q, k, v)]
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in rows)
    if steps.dtype != torch.float32 or not steps.is_contiguous():
        steps = steps.float().contiguous()
    initial = None if initial is None else initial.float().contiguous()
    g = None if g is None else g.float().clamp(min=MIN_LOG_DECAY).contiguous()
    return ScanInputs(q, k, v, StepSizes(steps, per_token), initial, cu_seqlens, scale, g)


def scan_backward(
    saved: Saved,
    do: torch.Tensor,
    d_final: torch.Tensor | None = None,
    *,
    backend: switches.Backend,
) -> Gradients:
    """Return the gradients of the inputs, by the implementation of the forward pass or by Triton.

    Args:
        saved: from the result of `scan_forward`; its device must be the current one.
        do: the gradient of o, with v's shape.
        d_final: the gradient of the final state, `[sequences, H, S, S]`, or None.
        backend: the value of QUASAR_BACKEND in the forward pass.
    """
    q, k, v, steps, initial_state, _, _, g = saved.inputs
    if q.numel() == 0:
        zeros = [torch.zeros_like(x) for x in (q, k, v, steps.values)]
        d_initial = None if initial_state is None else d_final
        return Gradients(*zeros, d_initial, None if g is None else torch.zeros_like(g))
    do = do.to(q.dtype).contiguous()
    if d_final is not None:
        d_final = d_final.float().contiguous()
    gradients = None
    if isinstance(saved.segments, Segments):
        program = cuda_gradient_program(saved.inputs)
        if program is not None:
            try:
                gradients = cuda_scan_bwd.backward(saved, do, d_final, program=program)
            except CudaUnavailableError as error:
                cuda_scan_bwd.PROGRAM.failed(backend, program.variant, error)
        if gradients is None:
            saved = saved._replace(segments=plan_of(v, saved.segments))
    if gradients is None:
        gradients = triton_passes.backward(saved, do, d_final)
    if q.shape[2] != v.shape[2]:
        dq, dk = (x.unflatten(2, (q.shape[2], -1)).sum(3) for x in gradients[:2])
        gradients = gradients._replace(q=dq, k=dk)
    return gradients


def cuda_program(inputs: ScanInputs, backend: switches.Backend) -> LoadedProgram | None:
    """Return the program of a call's forward pass, or None if the CUDA kernels are not used.

    Raises:
        CudaUnavailableError: `backend` is `cuda`, and the CUDA kernels do not support the call or
            cannot be built.
    """
    options = cuda_scan.step_options(inputs) if inputs.steps.per_token else ()
    return _choose(backend, inputs.q, inputs.k, inputs.v, options).program


def prepare_training(
    x: torch.Tensor, heads: int, width: int, options: tuple[str, ...], *, training: bool = True
) -> None:
    """Start to compile the CUDA kernels of both passes in the background, if they serve the call.

    A process's first training step then waits for the slowest compilation, not for all of them.

    Args:
        x: a tensor on the operator's device, in its dtype.
        heads, width: of the operator's v.
        options: from `cuda_scan.step_options`.
        training: False for the forward pass only.
    """
    supported = x.is_cuda and x.dtype in DTYPES and width in cuda_scan.HEAD_DIMS
    if not supported or switches.requested_backend() not in ("auto", "cuda"):
        return
    variant = cuda_scan.variant_for(x.device.index, x.dtype, heads, width, options)
    cuda_scan.PROGRAM.prepare(variant)
    if training and cuda_scan_bwd.is_for(x.device.index, width):
        cuda_scan_bwd.PROGRAM.prepare(variant)


def cuda_gradient_program(inputs: ScanInputs) -> LoadedProgram | None:
    """Return the CUDA program of the gradients of `cuda_scan.forward`, or None for Triton's."""
    if not cuda_scan_bwd.is_for(inputs.q.device.index, inputs.q.shape[-1]):
        return None
    options = cuda_scan.step_options(inputs) if inputs.steps.per_token else ()
    variant = cuda_scan.variant_of(inputs.v, options)
    return cuda_scan_bwd.PROGRAM.find_loaded(variant)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
