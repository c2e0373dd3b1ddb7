"""Selects the implementation of a `chunk_quasar` call: CUDA C++, Triton or torch.

QUASAR_BACKEND decides: `auto` (the default) uses CUDA for supported calls and Triton for others on
a GPU; `cuda` raises for unsupported calls, so that nothing else is measured by mistake; `triton`
and `torch` use those. When the CUDA kernels cannot be built or run, `auto` logs one line with the
cause and the remedy, and uses Triton from then on.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from fla.ops.quasar import switches
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.program import LoadedProgram
from fla.ops.quasar.cuda.scan import backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import forward as cuda_scan
from fla.ops.quasar.segments import Segments


class Choice(NamedTuple):
    """The implementation of a call, and why no faster one is used."""

    backend: Literal["cuda", "triton", "torch"]
    reason: str  # a clause
    remedy: str = ""  # how to enable a faster one, if known
    program: LoadedProgram | None = None  # of the CUDA kernels


def choose_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Choice:
    """Return the implementation of `chunk_quasar` for q, k, v `[B, T, H, S]`, and the reason.

    The first call for a device, dtype and kind of heads compiles the CUDA kernels where they apply,
    or reads them from the cache.

    Raises:
        ValueError: QUASAR_BACKEND has no known value.
        CudaUnavailableError: QUASAR_BACKEND is `cuda` and the CUDA kernels do not support the call.
    """
    return _choose(switches.requested_backend(), q, k, v)


def _choose(
    name: switches.Backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: tuple[str, ...] = (),
) -> Choice:
    remedy = ""
    if name == "torch" or (name == "triton" and q.is_cuda):
        return Choice(name, f"{switches.BACKEND}={name}")
    reason = cuda_scan.reason_against(q, k, v) if q.is_cuda else "the tensors are not on a GPU"
    if reason is None:
        program = cuda_scan.PROGRAM.find(cuda_scan.variant_of(v, options))
        if isinstance(program, LoadedProgram):
            return Choice("cuda", "the CUDA kernels take this call", program=program)
        reason, remedy = program.problem, program.remedy
    if name == "cuda":
        remedy = f"{remedy}, or " if remedy else ""
        raise CudaUnavailableError(
            f"{switches.BACKEND}=cuda, but {reason}", f"{remedy}set {switches.BACKEND}=auto"
        )
    return Choice("triton" if q.is_cuda else "torch", reason, remedy)


def cuda_forward(
    backend: switches.Backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    scale: float,
    cu_seqlens: torch.Tensor | None,
    g: torch.Tensor | None = None,
) -> cuda_scan.Forward | None:
    """Run the CUDA forward pass: `cuda_scan.Forward`, or None if another backend is used.

    Args:
        backend: QUASAR_BACKEND's value.
        q, ..., g: as `cuda_scan.forward`; q's device is the current one.

    Raises:
        CudaUnavailableError: `backend` is `cuda`, and the CUDA kernels do not take the call or a
            launch fails.
    """
    program = _choose(backend, q, k, v, cuda_scan.step_options(beta, g)).program
    if program is None:
        return None
    return cuda_scan.PROGRAM.attempt(
        backend,
        program,
        cuda_scan.forward,
        q,
        k,
        v,
        beta,
        initial_state,
        output_final_state,
        scale,
        cu_seqlens,
        g,
    )


def cuda_backward(
    backend: switches.Backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    G: torch.Tensor | None,
    states: torch.Tensor | None,
    do: torch.Tensor,
    d_final: torch.Tensor | None,
    scale: float,
    cut: Segments,
    g: torch.Tensor | None = None,
) -> cuda_scan_bwd.Gradients | None:
    """Run the CUDA backward pass behind the CUDA forward pass, or None if Triton is used.

    Args:
        backend: QUASAR_BACKEND's value at the forward pass.
        q, ..., g: as `cuda_scan_bwd.backward`; q's device is the current one.

    Raises:
        CudaUnavailableError: `backend` is `cuda`, and a launch fails.
    """
    if not cuda_scan_bwd.is_for(q):
        return None
    options = cuda_scan.step_options(beta, g)
    program = cuda_scan_bwd.PROGRAM.find(cuda_scan.variant_of(v, options))
    if not isinstance(program, LoadedProgram):
        return None
    return cuda_scan_bwd.PROGRAM.attempt(
        backend, program, cuda_scan_bwd.backward,
        q, k, v, beta, initial_state, G, states, do, d_final, scale, cut, g,
    )  # fmt: skip


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
