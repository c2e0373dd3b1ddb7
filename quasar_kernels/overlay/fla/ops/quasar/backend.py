"""Which implementation takes a call of `chunk_quasar`, and why: CUDA C++, Triton or torch.

QUASAR_BACKEND chooses: `auto` (the default) takes CUDA where it applies and Triton elsewhere on a
GPU; `cuda` raises where CUDA does not apply, so that nothing else is measured by mistake; `triton`
and `torch` take those. When the CUDA kernels cannot be built or run, `auto` logs one line that
names the cause and the remedy, and Triton serves from then on.
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import torch

from fla.ops.quasar.cuda.scan import forward as cuda_scan
from fla.ops.quasar.cuda.scan import backward as cuda_scan_bwd
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.programs import Programs
from fla.ops.quasar.segments import Segments

SWITCH = "QUASAR_BACKEND"
"""Environment variable with one of `BACKENDS`; read at every call."""
BACKENDS = ("auto", "cuda", "triton", "torch")

_programs = Programs(
    lambda key: cuda_scan.load_program(key), "the CUDA kernels are not used, Triton serves: %s"
)
_gradient_programs = Programs(
    lambda key: cuda_scan_bwd.load_program(key),
    "the CUDA kernels of the gradients are not used, Triton serves: %s",
)


class Choice(NamedTuple):
    """The implementation of a call, and one line that says why it and not a faster one."""

    backend: Literal["cuda", "triton", "torch"]
    reason: str


def requested_backend() -> str:
    """Return QUASAR_BACKEND, `auto` where it is not set.

    Raises:
        ValueError: it is none of `BACKENDS`.
    """
    name = os.environ.get(SWITCH, "auto")
    if name not in BACKENDS:
        raise ValueError(f"{SWITCH} is {name!r}; set it to one of {', '.join(BACKENDS)}")
    return name


def choose_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Choice:
    """Return which implementation `chunk_quasar` takes for q, k, v `[B, T, H, S]`, and why.

    The first call for a device, dtype and kind of heads compiles the CUDA kernels where they apply,
    or reads them from the cache.

    Raises:
        ValueError: QUASAR_BACKEND has no known value.
        CudaUnavailableError: QUASAR_BACKEND is `cuda` and the CUDA kernels do not take the call.
    """
    name = requested_backend()
    if name == "torch":
        return Choice("torch", f"{SWITCH}=torch")
    if not q.is_cuda:
        reason = "the tensors are not on a GPU"
    elif name == "triton":
        return Choice("triton", f"{SWITCH}=triton")
    else:
        reason = _reason_against_cuda(q, k, v)
    if reason is None:
        return Choice("cuda", "the CUDA kernels take this call")
    if name == "cuda":
        raise CudaUnavailableError(f"{SWITCH}=cuda, but {reason}", f"set {SWITCH}=auto")
    return Choice("triton" if q.is_cuda else "torch", reason)


def _reason_against_cuda(q, k, v) -> str | None:
    reason = cuda_scan.reason_against(q, k, v)
    return reason or _programs.reason_against(cuda_scan.program_key(q))


def cuda_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    scale: float,
    cu_seqlens: torch.Tensor | None,
) -> cuda_scan.Forward | None:
    """Run the CUDA forward pass: `cuda_scan.Forward`, or None where another implementation serves.

    Args: as `cuda_scan.forward`; q's device is the current one.

    Raises:
        ValueError, CudaUnavailableError: as `choose_backend`; with QUASAR_BACKEND=cuda also when a
            launch fails.
    """
    if choose_backend(q, k, v).backend != "cuda":
        return None
    try:
        return cuda_scan.forward(
            q, k, v, beta, initial_state, output_final_state, scale, cu_seqlens
        )
    except CudaUnavailableError as error:
        if requested_backend() == "cuda":
            raise
        _programs.give_up(cuda_scan.program_key(q), error)
        return None


def cuda_backward(
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
) -> cuda_scan_bwd.Gradients | None:
    """Run the CUDA backward pass behind the CUDA forward pass, or None where Triton serves.

    Args: as `cuda_scan_bwd.backward`; q's device is the current one.

    Raises:
        CudaUnavailableError: QUASAR_BACKEND is `cuda`, and a launch fails.
    """
    key = cuda_scan.program_key(q)
    if not cuda_scan_bwd.is_for(key) or _gradient_programs.get(key) is None:
        return None
    try:
        return cuda_scan_bwd.backward(
            q, k, v, beta, initial_state, G, states, do, d_final, scale, cut
        )
    except CudaUnavailableError as error:
        if requested_backend() == "cuda":
            raise
        _gradient_programs.give_up(key, error)
        return None
