"""QuasarAttention's step size, alpha = (1 - exp(-beta lambda)) / (lambda + 1e-8), with gradients.

With x = beta lambda, r = lambda / (lambda + eps) and g(x) = (1 - exp(-x)) / x, alpha = beta g(x) r:

    d alpha / d beta   = exp(-x) r
    d alpha / d lambda = beta g(x) eps / (lambda + eps)^2 - beta^2 h(x) r,    h(x) = -g'(x)

g and h are computed by their series for small x, where the closed forms lose all digits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fla.ops.quasar.arguments import expect_dtype
from fla.ops.quasar.device import on_its_device, once_differentiable

EPSILON = 1e-8
"""Added to lambda in the step size; part of the operator's definition."""

_SERIES_BELOW = 0.1
_G_SERIES = [(-1) ** n / math.factorial(n + 1) for n in range(10)]
_H_SERIES = [(-1) ** n * (n + 1) / math.factorial(n + 2) for n in range(10)]


@triton.jit
def quasar_step_size(lam, beta):
    """Return alpha for fp32 `lam` and `beta` of broadcastable shapes."""
    x = beta * lam
    # 1 - exp(-x) with all digits for small x; Triton has no expm1 outside of CUDA's libdevice
    series = x * (1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6 * (1 - x / 7))))))
    return tl.where(x < 0.25, series, 1 - tl.exp(-x)) / (lam + 1e-8)


@triton.jit
def quasar_step_size_bwd(lam, beta):
    """Return d alpha / d lambda and d alpha / d beta for fp32 `lam` and `beta`."""
    x = beta * lam
    decay = tl.exp(-x)
    small = x < 0.25
    safe = tl.where(small, 1.0, x)
    g_series = 1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6))))
    h_series = 0.5 - x * (1 / 3 - x * (1 / 8 - x * (1 / 30 - x * (1 / 144 - x / 840))))
    g = tl.where(small, g_series, (1 - decay) / safe)
    h = tl.where(small, h_series, (1 - decay * (1 + x)) / (safe * safe))
    total = lam + 1e-8
    ratio = lam / total
    slope = beta * g * (1e-8 / total) / total - beta * beta * h * ratio
    return slope, decay * ratio


@triton.jit(do_not_specialize=["N"])
def quasar_gate_fwd_kernel(lam, beta, alpha, N, H: tl.constexpr, BLOCK: tl.constexpr):
    """Write alpha for N = tokens * H values of lambda, head fastest; grid: (N / BLOCK,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    b_lam = tl.load(lam + at, mask=mask, other=0.0).to(tl.float32)
    b_beta = tl.load(beta + at % H, mask=mask, other=0.0).to(tl.float32)
    tl.store(alpha + at, quasar_step_size(b_lam, b_beta).to(alpha.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def quasar_gate_bwd_kernel(lam, beta, dalpha, dlam, dbeta, N, H: tl.constexpr, BLOCK: tl.constexpr):
    """Write dlambda, and each value's share of dbeta (fp32, summed over tokens by the caller)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    b_lam = tl.load(lam + at, mask=mask, other=0.0).to(tl.float32)
    b_beta = tl.load(beta + at % H, mask=mask, other=0.0).to(tl.float32)
    b_dalpha = tl.load(dalpha + at, mask=mask, other=0.0).to(tl.float32)
    slope, share = quasar_step_size_bwd(b_lam, b_beta)
    tl.store(dlam + at, (b_dalpha * slope).to(dlam.dtype.element_ty), mask=mask)
    tl.store(dbeta + at, b_dalpha * share, mask=mask)


def divisible(step: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return step sizes by which the backward pass can divide: at least 2^-26, except in fp16.

    The gradient of a step size a is a multiple of V' / a, so a must not be zero. A step of 2^-26
    changes no fp32 state, and its V' can be represented in bf16 and fp32. Smaller steps would lose
    digits, because the CUDA kernels' fp16 inverses contain the root of a. In fp16, V' would be
    zero, so there the gradient of a zero step is zero.
    """
    return step if dtype == torch.float16 else step.clamp(min=2.0**-26)


def _polynomial(x: torch.Tensor, coefficients: list[float]) -> torch.Tensor:
    value = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = value * x + c
    return value


def _gate_bwd_torch(lam, beta, dalpha):
    x = beta * lam
    decay = torch.exp(-x)
    small = x < _SERIES_BELOW
    safe = torch.where(small, 1.0, x)
    g = torch.where(small, _polynomial(x, _G_SERIES), -torch.expm1(-x) / safe)
    h = torch.where(small, _polynomial(x, _H_SERIES), (1 - decay * (1 + x)) / safe**2)
    total = lam + EPSILON
    ratio = lam / total
    slope = beta * g * (EPSILON / total) / total - beta**2 * h * ratio
    return dalpha * slope, dalpha * decay * ratio


def _launch(kernel, *tensors: torch.Tensor, heads: int) -> None:
    """Run a gate kernel over tensors of shape `[tokens, H]` (beta: `[H]`)."""
    n, block = tensors[0].numel(), 1024
    if n:
        kernel[(-(-n // block),)](*tensors, n, H=heads, BLOCK=block, num_warps=4)


class QuasarGateFunction(torch.autograd.Function):
    """alpha of `[tokens, H]` lambda and `[H]` beta; fp32 arithmetic, fp64 for fp64 lambda."""

    @staticmethod
    def forward(ctx, lam, beta, output_dtype):
        ctx.save_for_backward(lam, beta)
        if lam.is_cuda and lam.dtype != torch.float64:
            alpha = torch.empty(lam.shape, dtype=output_dtype, device=lam.device)
            _launch(quasar_gate_fwd_kernel, lam, beta, alpha, heads=lam.shape[-1])
            return alpha
        lam, beta = _arithmetic(lam, beta)
        return (-torch.expm1(-beta * lam) / (lam + EPSILON)).to(output_dtype)

    @staticmethod
    @once_differentiable
    @on_its_device
    def backward(ctx, dalpha):
        lam, beta = ctx.saved_tensors
        dalpha = dalpha.contiguous()
        if lam.is_cuda and lam.dtype != torch.float64:
            dlam = torch.empty_like(lam)
            share = torch.empty(lam.shape, dtype=torch.float32, device=lam.device)
            tensors = (lam, beta, dalpha, dlam, share)
            _launch(quasar_gate_bwd_kernel, *tensors, heads=lam.shape[-1])
        else:
            dlam, share = _gate_bwd_torch(*_arithmetic(lam, beta, dalpha))
        return dlam.to(lam.dtype), share.sum(0).to(beta.dtype), None


def _arithmetic(lam, *others):
    dtype = torch.float64 if lam.dtype == torch.float64 else torch.float32
    return tuple(x.to(dtype) for x in (lam, *others))


@torch.compiler.disable
@on_its_device
def fused_quasar_gate(
    lambda_t: torch.Tensor, beta: torch.Tensor, output_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Compute the step size alpha = (1 - exp(-beta lambda)) / (lambda + 1e-8).

    Args:
        lambda_t: |k|^2, `[..., H]` or `[..., H, 1]`, bf16, fp16, fp32 or fp64, not negative.
        beta: `[H]`, positive.
        output_dtype: dtype of the result; the arithmetic is fp32 (fp64 for fp64 lambda).

    Returns:
        alpha of lambda's shape. Gradients reach `lambda_t` and `beta`, finite at lambda = 0.

    Raises:
        ValueError: lambda's shape does not end in H, or in H and 1, or another dtype.
    """
    expect_dtype("lambda_t", lambda_t)
    expect_dtype("beta", beta)
    H = beta.numel()
    shape = lambda_t.shape
    if shape[-1:] != (H,) and shape[-2:] != (H, 1):
        raise ValueError(
            f"lambda_t must have shape [..., {H}] or [..., {H}, 1] to fit beta [{H}]; "
            f"got {tuple(shape)}"
        )
    lam = lambda_t.reshape(-1, H).contiguous()
    return QuasarGateFunction.apply(lam, beta.contiguous(), output_dtype).view(shape)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
