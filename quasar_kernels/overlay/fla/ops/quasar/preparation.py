"""Unit q and k, and step sizes by a sigmoid, in one Triton launch for each pass.

    unit(x) = x / sqrt(|x|^2 + 1e-6)        step = factor sigmoid(beta)

unit is flash-linear-attention's `use_qk_l2norm_in_kernel`. The tiles are constants, so nothing is
tuned at run time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fla.ops.quasar.chunk_torch import l2norm
from fla.ops.quasar.device import on_its_device, once_differentiable
from fla.ops.quasar.triton_kernels.launch import Launcher, compile_ahead, padded

MAX_WIDTH = 256
"""Widest rows that the kernels hold in registers; torch prepares wider ones."""
STEPS = 1024
"""Number of step sizes that a program computes."""
_ELEMENTS = 4096  # of q and of k that a program loads: 32 for each thread


class Preparation(NamedTuple):
    """What is computed from q, k and beta before the operator."""

    unit: bool = False  # whether q and k are divided by their lengths
    factor: float = 0.0  # beta becomes factor sigmoid(beta); 0 leaves it unchanged


UNCHANGED = Preparation()


@triton.jit
def _unit(x, x_unit, inverse, row, at, out, is_row, mask):
    b_x = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    b_inverse = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) + 1e-6)
    tl.store(x_unit + out, (b_x * b_inverse[:, None]).to(x_unit.dtype.element_ty), mask=mask)
    tl.store(inverse + row, b_inverse, mask=is_row)


@triton.jit
def _unit_grad(x_unit, dx, inverse, row, at, is_row, mask):
    b_unit = tl.load(x_unit + at, mask=mask, other=0.0).to(tl.float32)
    b_d = tl.load(dx + at, mask=mask, other=0.0).to(tl.float32)
    b_inverse = tl.load(inverse + row, mask=is_row, other=0.0)
    b_d = (b_d - b_unit * tl.sum(b_unit * b_d, axis=1)[:, None]) * b_inverse[:, None]
    tl.store(dx + at, b_d.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _place(n, T, stride_b, stride_t, stride_h, H: tl.constexpr):
    # the offset of element n of [B, T, H] with these strides
    token = n // H
    return token // T * stride_b + token % T * stride_t + n % H * stride_h


@triton.jit(do_not_specialize=["T", "N", "M", "stride_bb", "stride_bt", "stride_bh"])
def preparation_kernel(
    q, k, beta, q_unit, k_unit, inverse, step, T, N, M, factor,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_bb, stride_bt, stride_bh,
    H: tl.constexpr, HV: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
    BM: tl.constexpr, UNIT: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """With UNIT, write unit q and k and their inverse lengths; unless beta is None, write steps.

    The steps are factor sigmoid(beta) with SIGMOID, otherwise beta.

    q and k are `[B, T, H, S]`, N = B T H, with a last stride of one; beta is `[B, T, HV]`,
    M = B T HV. The results are contiguous, inverse `[2, N]` and step in fp32.
    Grid: (max(N / BR, M / BM),).
    """
    i = tl.program_id(0).to(tl.int64)
    if UNIT:
        rows = i * BR + tl.arange(0, BR)
        cols = tl.arange(0, BS)[None, :]
        is_row = rows < N
        mask = is_row[:, None] & (cols < S)
        out = rows[:, None] * S + cols
        at_q = _place(rows, T, stride_qb, stride_qt, stride_qh, H)[:, None] + cols
        at_k = _place(rows, T, stride_kb, stride_kt, stride_kh, H)[:, None] + cols
        _unit(q, q_unit, inverse, rows, at_q, out, is_row, mask)
        _unit(k, k_unit, inverse, rows + N, at_k, out, is_row, mask)
    if beta is not None:
        n = i * BM + tl.arange(0, BM)
        at = _place(n, T, stride_bb, stride_bt, stride_bh, HV)
        b_beta = tl.load(beta + at, mask=n < M, other=0.0).to(tl.float32)
        if SIGMOID:
            b_beta = factor / (1.0 + tl.exp(-b_beta))
        tl.store(step + n, b_beta, mask=n < M)


@triton.jit(do_not_specialize=["T", "N", "M", "stride_bb", "stride_bt", "stride_bh"])
def preparation_grad_kernel(
    q_unit, k_unit, inverse, beta, dq, dk, d_step, T, N, M, factor,
    stride_bb, stride_bt, stride_bh,
    HV: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Overwrite gradients of the results of `preparation_kernel` by those of its inputs.

    dq, dk and d_step are contiguous. Grid: as `preparation_kernel`.
    """
    i = tl.program_id(0).to(tl.int64)
    if UNIT:
        rows = i * BR + tl.arange(0, BR)
        cols = tl.arange(0, BS)[None, :]
        is_row = rows < N
        mask = is_row[:, None] & (cols < S)
        at = rows[:, None] * S + cols
        _unit_grad(q_unit, dq, inverse, rows, at, is_row, mask)
        _unit_grad(k_unit, dk, inverse, rows + N, at, is_row, mask)
    if beta is not None:
        n = i * BM + tl.arange(0, BM)
        at = _place(n, T, stride_bb, stride_bt, stride_bh, HV)
        b_beta = tl.load(beta + at, mask=n < M, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-b_beta))
        b_d = tl.load(d_step + n, mask=n < M, other=0.0)
        tl.store(d_step + n, b_d * factor * share * (1.0 - share), mask=n < M)


_forward = Launcher(preparation_kernel)
_backward = Launcher(preparation_grad_kernel)


class Prepared(NamedTuple):
    """The operator's inputs, and what their gradients need."""

    q: torch.Tensor
    k: torch.Tensor
    beta: torch.Tensor
    inverse: torch.Tensor | None  # [2, B T H] fp32, of q's and k's lengths
    logits: torch.Tensor | None  # beta before the sigmoid


def supports(q: torch.Tensor) -> bool:
    """Return whether the kernels prepare calls with this q; otherwise torch does."""
    return q.is_cuda and q.shape[-1] <= MAX_WIDTH and q.dtype != torch.float64


def launch_preparation(
    how: Preparation, q: torch.Tensor, k: torch.Tensor, beta: torch.Tensor
) -> Prepared:
    """Launch the forward kernel on q's device, the current one.

    Args:
        q, k: `[B, T, H, S]`, of any strides.
        beta: `[B, T, HV]`, of any strides and dtype; without a factor also of another shape.
    """
    B, T, H, S = q.shape
    N = B * T * H
    units: tuple[Any, ...] = (None, None)
    inverse = step = None
    if how.unit:
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        units = _contiguous_like(q, q.dtype), _contiguous_like(k, k.dtype)
        inverse = q.new_empty(2, N, dtype=torch.float32)
    M, HV, sigmoid = 0, 1, how.factor != 0
    strides: tuple[int, ...] = (0, 0, 0)
    if sigmoid or (beta.ndim == 3 and beta.dtype != torch.float32):  # the operator takes fp32
        M, HV, strides = beta.numel(), beta.shape[2], beta.stride()
        step = _contiguous_like(beta, torch.float32)
    if N:
        block, rows = tile(S)
        tensors = (q, k, None if step is None else beta, *units, inverse, step)
        sizes = (T, N, M, how.factor, *q.stride()[:3], *k.stride()[:3], *strides)
        constants = (H, HV, S, block, rows, STEPS, how.unit, sigmoid)
        _forward((_programs(how, N, M, rows), 1, 1), tensors + sizes, constants, num_warps=4)
    q, k = units if how.unit else (q, k)
    return Prepared(q, k, beta if step is None else step, inverse, beta if sigmoid else None)


def launch_preparation_grad(
    how: Preparation, prepared: Prepared, dq: torch.Tensor, dk: torch.Tensor, d_step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward kernel, which overwrites gradients that are contiguous.

    Args:
        prepared: the results of the forward kernel.
        dq, dk, d_step: gradients of these, d_step in fp32.

    Returns:
        The gradients of q, k and beta.
    """
    q, k, _, inverse, logits = prepared
    T, S = q.shape[1], q.shape[3]
    N = q.numel() // S
    M, HV = 0, 1
    strides: tuple[int, ...] = (0, 0, 0)
    dq, dk, d_step = dq.contiguous(), dk.contiguous(), d_step.contiguous()
    if logits is not None:
        M, HV, strides = logits.numel(), logits.shape[2], logits.stride()
    if N:
        block, rows = tile(S)
        tensors = (q, k, inverse, logits, dq, dk, d_step)
        constants = (HV, S, block, rows, STEPS, how.unit)
        sizes = (T, N, M, how.factor, *strides)
        _backward((_programs(how, N, M, rows), 1, 1), tensors + sizes, constants, num_warps=4)
    return dq, dk, d_step


def _contiguous_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def tile(S: int) -> tuple[int, int]:
    """Return the padded head width and the rows of a program."""
    block = padded(S, 16)
    return block, _ELEMENTS // block


def compile_preparation(
    how: Preparation, q: torch.Tensor, k: torch.Tensor, beta: torch.Tensor, training: bool
) -> None:
    """Start to compile the kernels of calls like this one; with `training`, of both passes."""
    key = how, training, q.shape[2:], q.dtype, k.dtype, beta.dtype
    compile_ahead(key, _passes, how, q, k, beta, training)


def _passes(
    how: Preparation, q: torch.Tensor, k: torch.Tensor, beta: torch.Tensor, training: bool
) -> None:
    prepared = launch_preparation(how, q, k, beta)
    if training:
        d_step = torch.empty_like(prepared.beta, dtype=torch.float32)
        launch_preparation_grad(how, prepared, torch.empty_like(q), torch.empty_like(k), d_step)


def _programs(how: Preparation, N: int, M: int, rows: int) -> int:
    return max(-(-N // rows) if how.unit else 0, -(-M // STEPS))


class PreparationFunction(torch.autograd.Function):
    """The kernels as a node of autograd, for operators that do not launch them in their own."""

    @staticmethod
    def forward(ctx: Any, how: Preparation, q: Any, k: Any, beta: Any) -> tuple[torch.Tensor, ...]:
        """Compute `prepare`."""
        prepared = launch_preparation(how, q, k, beta)
        ctx.how = how
        ctx.save_for_backward(*prepared[:2], *prepared[3:])
        return prepared[:3]

    @staticmethod
    @once_differentiable
    @on_its_device
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of `forward`'s arguments."""
        q, k, *kept = ctx.saved_tensors
        dq, dk, d_step = (d.clone() for d in gradients)  # other nodes may read these, too
        return None, *launch_preparation_grad(
            ctx.how, Prepared(q, k, d_step, *kept), dq, dk, d_step
        )


def prepare(
    how: Preparation, q: torch.Tensor, k: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and beta for the operator, differentiably.

    Args:
        q, k: `[B, T, H, S]`.
        beta: `[B, T, HV]`; of any shape if `how.factor` is 0.
    """
    if how == UNCHANGED:
        return q, k, beta
    if supports(q):
        return PreparationFunction.apply(how, q, k, beta)
    if how.unit:
        q, k = l2norm(q), l2norm(k)
    if how.factor:
        wide = beta if beta.dtype == torch.float64 else beta.float()
        beta = torch.sigmoid(wide) * how.factor
    return q, k, beta


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
