"""Inverse of unit lower triangular matrices by block forward substitution, with its gradient.

The inverses of adjacent diagonal blocks are joined in pairs. This recursion is stable. In a Neumann
series, the powers of L - I would grow without bound for correlated keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.ops.quasar.arguments import expect_dtype
from fla.ops.quasar.device import on_its_device, once_differentiable
from fla.ops.quasar.triton_kernels.device_functions import unit_lower_inverse


@triton.jit
def forward_substitution_kernel(
    L_ptr, L_stride_bh, A_ptr, A_stride_bh, BT: tl.constexpr, C: tl.constexpr
):
    """Invert a row-major BT x BT matrix per program, padded to C = max(16, BT); grid: (matrices,).

    Only the part of L below the diagonal is read. A is written with zeros above the diagonal. BT is
    a power of two. The chunk kernels use the same device function.
    """
    i_m = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inside = (rows < BT) & (cols < BT)
    p_L = L_ptr + i_m * L_stride_bh + rows * BT + cols
    M = tl.load(p_L, mask=inside & (rows > cols), other=0.0).to(tl.float32)
    A = unit_lower_inverse(M, tl.float32, "tf32x3")
    p_A = A_ptr + i_m * A_stride_bh + rows * BT + cols
    tl.store(p_A, A.to(A_ptr.dtype.element_ty), mask=inside)


def launch_forward_substitution(L: torch.Tensor) -> torch.Tensor:
    """Invert contiguous fp32 `[n, C, C]` by the kernel, C a power of two."""
    A = torch.empty_like(L)
    n, C, _ = L.shape
    if n:
        forward_substitution_kernel[(n,)](L, C * C, A, C * C, BT=C, C=max(16, C), num_warps=4)
    return A


class ForwardSubstitutionFunction(torch.autograd.Function):
    """A = L^-1, with the gradient dL = -A^T dA A^T below the diagonal."""

    @staticmethod
    def forward(ctx, L):
        C = L.shape[-1]
        if L.is_cuda and L.dtype != torch.float64 and C & (C - 1) == 0 and 2 <= C <= 64:
            A = launch_forward_substitution(L.float().reshape(-1, C, C).contiguous())
            A = A.view(L.shape)
        else:
            wide = L if L.dtype == torch.float64 else L.float()
            identity = torch.eye(C, dtype=wide.dtype, device=L.device).expand_as(wide)
            A = torch.linalg.solve_triangular(wide, identity, upper=False, unitriangular=True)
        ctx.save_for_backward(A)
        ctx.dtype = L.dtype
        return A.to(L.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dA):
        (A,) = ctx.saved_tensors
        with torch.autocast(dA.device.type, enabled=False):
            dL = -(A.mT @ dA.to(A.dtype) @ A.mT)
        return dL.tril(-1).to(ctx.dtype)


@torch.compiler.disable
@on_its_device
def quasar_forward_substitution(L: torch.Tensor) -> torch.Tensor:
    """Return the inverse of unit lower triangular matrices.

    Only the part of L below the diagonal is read. The diagonal counts as ones and the part above it
    as zeros; the gradients of these are zero.

    Args:
        L: `[..., C, C]`, bf16, fp16, fp32 or fp64; the arithmetic is fp32 (fp64 for fp64).

    Returns:
        A = L^-1 of the same shape and dtype, exactly one on the diagonal and zero above it.

    Raises:
        ValueError: the matrices are not square, or have another dtype.
    """
    expect_dtype("L", L)
    if L.ndim < 2 or L.shape[-1] != L.shape[-2]:
        raise ValueError(f"L must hold square matrices [..., C, C]; got {tuple(L.shape)}")
    return ForwardSubstitutionFunction.apply(L)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
