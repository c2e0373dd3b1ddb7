"""What the adaptive layer computes between its convolution and the operator: q, k and step sizes.

    q, k = unit(rotated(q)), unit(rotated(k))        unit(x) = x / max(|x|, 1e-12)
    s = sigmoid(logits)    d = exp(-exp(A_log) softplus(s + dt_bias))
    step = mean over channels of (1 - d) / (clamp(|k|^2, 0.1, 10) + 1e-6)

Source: the public QuasarAttention layer of spring 2026. There, |k|^2 is that of the unit k, so the
gradients treat it as a constant. It is 0 only for keys of zeros, which change no state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fla.ops.quasar.device import on_its_device, once_differentiable
from fla.ops.quasar.layer.gradients import gradient_scale, sigmoid
from fla.ops.quasar.triton_kernels.device_functions import operand
from fla.ops.quasar.triton_kernels.launch import Launcher, padded

EPSILON = 1e-12
"""The smallest length by which a row is divided."""
_MAX_PROGRAMS = 2048
"""Target number of row tiles of the backward launch: each writes sums that torch adds."""


class Rotation(NamedTuple):
    """Rotary embedding of the first R channels of each head, by halves."""

    cos: torch.Tensor  # [L, R] contiguous; row t % L belongs to token t of all tokens
    sin: torch.Tensor  # the same shape


@triton.jit
def _decay(scale, u):
    # return x = exp(A_log) softplus(u), and 1 - exp(-x) with all digits for small x
    x = scale * (tl.maximum(u, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(u))))
    series = x * (1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6 * (1 - x / 7))))))
    return x, tl.where(x < 0.25, series, 1.0 - tl.exp(-x))


@triton.jit(do_not_specialize=["N", "L"])
def operator_inputs_kernel(
    q, k, logits, A_log, dt_bias, cos, sin, q_unit, k_unit, step, lengths, N, L,
    stride_x, stride_u, stride_l,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write unit q and k, step sizes and 1 / max(|x|, 1e-12) of BR tokens of one head.

    q and k `[N, H, S]` have tokens stride_x apart, logits `[N, H]` stride_l apart, q_unit and
    k_unit `[N, H, S]` stride_u apart. q_unit and k_unit may be q and k. A_log `[H]`, dt_bias
    `[H, S]`, step `[N, H]` and lengths `[N, 2, H]` (both fp32), and cos and sin `[L, R]` are
    contiguous. R is 0 without a rotation.
    Grid: (N / BR, H).
    """
    head = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BS)
    is_row = rows < N
    mask = is_row[:, None] & (cols < S)[None, :]
    at = (rows * stride_x)[:, None] + (head * S + cols)[None, :]
    other = tl.where(cols < R // 2, cols + R // 2, cols - R // 2)
    partner = (rows * stride_x)[:, None] + (head * S + other)[None, :]
    at_table = (rows % L * R)[:, None] + cols[None, :]
    turned = is_row[:, None] & (cols < R)[None, :]
    out = (rows * stride_u)[:, None] + (head * S + cols)[None, :]
    sign = tl.where(cols < R // 2, -1.0, 1.0)[None, :]
    b_q = tl.load(q + at, mask=mask, other=0.0).to(tl.float32)
    b_k = tl.load(k + at, mask=mask, other=0.0).to(tl.float32)
    if R > 0:
        b_cos = tl.load(cos + at_table, mask=turned, other=1.0).to(tl.float32)
        b_sin = tl.load(sin + at_table, mask=turned, other=0.0).to(tl.float32) * sign
        b_q = b_q * b_cos + tl.load(q + partner, mask=turned, other=0.0).to(tl.float32) * b_sin
        b_k = b_k * b_cos + tl.load(k + partner, mask=turned, other=0.0).to(tl.float32) * b_sin
    inverse_q = 1.0 / tl.maximum(tl.sqrt(tl.sum(b_q * b_q, axis=1)), 1e-12)
    inverse_k = 1.0 / tl.maximum(tl.sqrt(tl.sum(b_k * b_k, axis=1)), 1e-12)
    b_k *= inverse_k[:, None]
    if R > 0:
        tl.debug_barrier()  # another thread may still read what this one overwrites
    tl.store(q_unit + out, (b_q * inverse_q[:, None]).to(q_unit.dtype.element_ty), mask=mask)
    tl.store(k_unit + out, b_k.to(k_unit.dtype.element_ty), mask=mask)
    tl.store(lengths + rows * 2 * H + head, inverse_q, mask=is_row)
    tl.store(lengths + rows * 2 * H + H + head, inverse_k, mask=is_row)

    s = sigmoid(tl.load(logits + rows * stride_l + head, mask=is_row, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head * S + cols, mask=cols < S, other=0.0).to(tl.float32)
    scale = tl.exp(tl.load(A_log + head).to(tl.float32))
    _, lost = _decay(scale, s[:, None] + bias[None, :])
    mean = tl.sum(tl.where((cols < S)[None, :], lost, 0.0), axis=1) / S
    square = tl.minimum(tl.maximum(tl.sum(b_k * b_k, axis=1), 0.1), 10.0) + 1e-6
    tl.store(step + rows * H + head, mean / square, mask=is_row)


@triton.jit
def _unit_gradient(
    unit, d_unit, at_unit, partner_unit, at, partner, inverse, mask, turned, b_cos, b_sin,
    ROTATE: tl.constexpr,
):  # fmt: skip
    # return the gradient of the rows before their rotation and division
    b_u = tl.load(unit + at_unit, mask=mask, other=0.0).to(tl.float32)
    b_d = tl.load(d_unit + at, mask=mask, other=0.0).to(tl.float32)
    dot = tl.sum(b_u * b_d, axis=1)[:, None]
    b_x = (b_d - b_u * dot) * inverse[:, None]
    if ROTATE:
        p_u = tl.load(unit + partner_unit, mask=turned, other=0.0).to(tl.float32)
        p_d = tl.load(d_unit + partner, mask=turned, other=0.0).to(tl.float32)
        b_x = b_x * b_cos + (p_d - p_u * dot) * inverse[:, None] * b_sin
    return b_x


@triton.jit(do_not_specialize=["N", "L", "TILES"])
def operator_inputs_grad_kernel(
    q_unit, k_unit, lengths, logits, A_log, dt_bias, cos, sin, dq_unit, dk_unit, d_step, dq, dk,
    d_logits, sums, largest, N, L, TILES,
    stride_u, stride_l, stride_d,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write the gradients of q, k and logits, and the sums of those of A_log and dt_bias.

    The tensors are those of `operator_inputs_kernel`; dq and dk are contiguous, d_logits has tokens
    stride_d apart. Unless `largest` is None, dq_unit, dk_unit, d_step, dq and dk contain the factor
    `gradient_scale(largest)`. fp16 saturates. A program processes TILES * BR tokens of one head and
    writes its sums to `sums`, fp32 `[programs, H, S + 1]`: the gradient of dt_bias, then that of
    A_log.
    Grid: (programs, H).
    """
    head = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * TILES * BR + tl.arange(0, BR)
    cols = tl.arange(0, BS)
    is_col = (cols < S)[None, :]
    other = tl.where(cols < R // 2, cols + R // 2, cols - R // 2)
    # the transpose of the rotation: sin of the partner, with the other sign
    sign = tl.where(cols < R // 2, 1.0, -1.0)[None, :]
    bias = tl.load(dt_bias + head * S + cols, mask=cols < S, other=0.0).to(tl.float32)
    scale = tl.exp(tl.load(A_log + head).to(tl.float32))
    unscale = 1.0
    if largest is not None:
        _, unscale = gradient_scale(largest)
    d_bias = tl.zeros([BR, BS], dtype=tl.float32)
    d_A = tl.zeros([BR], dtype=tl.float32)
    for _ in range(0, TILES):
        is_row = rows < N
        mask = is_row[:, None] & is_col
        at = (rows * H + head)[:, None] * S + cols[None, :]
        partner = (rows * H + head)[:, None] * S + other[None, :]
        at_unit = (rows * stride_u)[:, None] + (head * S + cols)[None, :]
        partner_unit = (rows * stride_u)[:, None] + (head * S + other)[None, :]
        turned = is_row[:, None] & (cols < R)[None, :]
        b_cos, b_sin = 1.0, 0.0
        if R > 0:
            table = (rows % L * R)[:, None]
            b_cos = tl.load(cos + table + cols[None, :], mask=turned, other=1.0).to(tl.float32)
            b_sin = tl.load(sin + table + other[None, :], mask=turned, other=0.0).to(tl.float32)
            b_sin *= sign
        inverse_q = tl.load(lengths + rows * 2 * H + head, mask=is_row, other=0.0)
        inverse_k = tl.load(lengths + rows * 2 * H + H + head, mask=is_row, other=0.0)
        g_q = _unit_gradient(
            q_unit, dq_unit, at_unit, partner_unit, at, partner, inverse_q, mask, turned,
            b_cos, b_sin, R > 0,
        )  # fmt: skip
        g_k = _unit_gradient(
            k_unit, dk_unit, at_unit, partner_unit, at, partner, inverse_k, mask, turned,
            b_cos, b_sin, R > 0,
        )  # fmt: skip
        tl.store(dq + at, operand(g_q, dq.dtype.element_ty), mask=mask)
        tl.store(dk + at, operand(g_k, dk.dtype.element_ty), mask=mask)

        s = sigmoid(tl.load(logits + rows * stride_l + head, mask=is_row, other=0.0).to(tl.float32))
        b_k = tl.load(k_unit + at_unit, mask=mask, other=0.0).to(tl.float32)
        # |k|^2 is 1 for the unit k before its rounding, or 0 for a key of zeros
        square = tl.where(tl.sum(b_k * b_k, axis=1) > 0.5, 1.0 + 1e-6, 0.1 + 1e-6)
        d_mean = tl.load(d_step + rows * H + head, mask=is_row, other=0.0).to(tl.float32)
        d_mean = d_mean * unscale / (square * S)
        u = s[:, None] + bias[None, :]
        x, lost = _decay(scale, u)
        kept = tl.where(mask, 1.0 - lost, 0.0) * d_mean[:, None]
        d_A += tl.sum(kept * x, axis=1)
        d_u = kept * scale * sigmoid(u)
        d_bias += d_u
        d_s = tl.sum(d_u, axis=1) * s * (1.0 - s)
        tl.store(d_logits + rows * stride_d + head, d_s.to(d_logits.dtype.element_ty), mask=is_row)
        rows += BR
    p_sums = sums + (tl.program_id(0).to(tl.int64) * H + head) * (S + 1)
    tl.store(p_sums + cols, tl.sum(d_bias, axis=0), mask=cols < S)
    tl.store(p_sums + S, tl.sum(d_A, axis=0))


_forward = Launcher(operator_inputs_kernel)
_backward = Launcher(operator_inputs_grad_kernel)


def _tile(S: int, elements: int = 2048) -> tuple[int, int]:
    """Return the padded head width and the tokens of a tile of `elements`.

    The default is fastest for the forward kernel with heads of 128 on an H100. With half as many
    elements, the backward kernel needs 80 registers per thread instead of 168, with a rotation 128
    instead of 204.
    """
    block = padded(S, 16)
    return block, max(4, elements // block)


def launch_operator_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    logits: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    rotation: Rotation | None,
    *,
    overwrite: bool = False,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward kernel.

    Args:
        q, k: `[N, H, S]` of one layout: heads adjacent, tokens any stride apart.
        logits: `[N, H]`, last stride 1.
        A_log: `[H]`, contiguous.
        dt_bias: `[H S]`, contiguous.
        rotation: of the first channels, or None.
        overwrite: whether the unit q and k overwrite q and k; otherwise they are contiguous.
        into: tensors for the step sizes and the inverse lengths, or None for new ones.

    Returns:
        Unit q and k in q's dtype; the step sizes `[N, H]` and the inverse lengths
        `[N, 2, H]`, fp32.
    """
    N, H, S = q.shape
    q_unit, k_unit = q, k
    if not overwrite:
        q_unit, k_unit = (torch.empty(N, H, S, dtype=q.dtype, device=q.device) for _ in range(2))
    if into is None:
        step = torch.empty(N, H, dtype=torch.float32, device=q.device)
        lengths = torch.empty(N, 2, H, dtype=torch.float32, device=q.device)
    else:
        step, lengths = into
    if N:
        block, rows = _tile(S)
        cos, sin, L, R = _table(rotation)
        _forward(
            (-(-N // rows), H, 1),
            (
                *(q, k, logits, A_log, dt_bias, cos, sin, q_unit, k_unit, step, lengths),
                *(N, L, q.stride(0), q_unit.stride(0), logits.stride(0)),
            ),
            (H, S, block, rows, R),
            num_warps=4,
        )
    return q_unit, k_unit, step, lengths


def launch_operator_inputs_grad(
    q_unit: torch.Tensor,
    k_unit: torch.Tensor,
    lengths: torch.Tensor,
    logits: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    rotation: Rotation | None,
    dq_unit: torch.Tensor,
    dk_unit: torch.Tensor,
    d_step: torch.Tensor,
    d_logits: torch.Tensor,
    largest: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward kernel; it writes d_logits `[N, H]`, last stride 1.

    Args:
        q_unit, k_unit, lengths: results of the forward kernel.
        logits, A_log, dt_bias, rotation: its arguments.
        dq_unit, dk_unit: gradients of the unit q and k, contiguous.
        d_step: gradient of the step sizes, `[N, H]` fp32 contiguous.
        largest: a number, if the last three contain the factor `gradient_scale(largest)`.

    Returns:
        The gradients of q and k, `[N, H, S]` in their dtype, contiguous, with the same factor; and
        those of A_log `[H]` and of dt_bias `[H S]` in fp32.
    """
    N, H, S = q_unit.shape
    dq, dk = (torch.empty(N, H, S, dtype=q_unit.dtype, device=q_unit.device) for _ in range(2))
    block, rows = _tile(S, 1024)
    tiles = max(1, -(-N * H // (rows * _MAX_PROGRAMS)))
    programs = -(-N // (rows * tiles))
    sums = torch.empty(programs, H, S + 1, dtype=torch.float32, device=q_unit.device)
    if N:
        cos, sin, L, R = _table(rotation)
        _backward(
            (programs, H, 1),
            (
                *(q_unit, k_unit, lengths, logits, A_log, dt_bias, cos, sin),
                *(dq_unit, dk_unit, d_step, dq, dk, d_logits, sums, largest, N, L, tiles),
                *(q_unit.stride(0), logits.stride(0), d_logits.stride(0)),
            ),
            (H, S, block, rows, R),
            num_warps=4,
        )
    total = sums.sum(0)
    return dq, dk, total[:, S], total[:, :S].flatten()


def _table(rotation: Rotation | None) -> tuple[Any, Any, int, int]:
    return (None, None, 1, 0) if rotation is None else (*rotation, *rotation.cos.shape)


class OperatorInputsFunction(torch.autograd.Function):
    """The kernels as a node of autograd; it saves the unit q and k instead of q and k."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, logits: Any, A_log: Any, dt_bias: Any, rotation: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute `operator_inputs`."""
        results = launch_operator_inputs(q, k, logits, A_log, dt_bias, rotation)
        q_unit, k_unit, step, lengths = results
        ctx.save_for_backward(q_unit, k_unit, lengths, logits, A_log, dt_bias)
        ctx.rotation = rotation
        return q_unit, k_unit, step

    @staticmethod
    @once_differentiable
    @on_its_device
    def backward(ctx: Any, dq_unit: Any, dk_unit: Any, d_step: Any) -> Any:
        """Return the gradients of `forward`'s arguments."""
        q_unit, k_unit, lengths, logits, A_log, dt_bias = ctx.saved_tensors
        d_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        dq, dk, d_A, d_dt = launch_operator_inputs_grad(
            q_unit, k_unit, lengths, logits, A_log, dt_bias, ctx.rotation, dq_unit.contiguous(),
            dk_unit.contiguous(), d_step.contiguous(), d_logits,
        )  # fmt: skip
        return dq, dk, d_logits, d_A.to(A_log.dtype), d_dt.to(dt_bias.dtype), None


def operator_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    logits: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    rotation: Rotation | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return unit q and k, and the step sizes, differentiably.

    Args:
        q, k: `[N, H, S]`, views of one projection: heads adjacent, tokens any stride apart.
        logits: `[N, H]`; their sigmoid is the input of the decays.
        A_log: `[H]`.
        dt_bias: `[H S]`.
        rotation: of the first channels of each head, or None; it gets no gradient.

    Returns:
        q and k `[N, H, S]` in their dtype, and the step sizes `[N, H]` in fp32 (fp64 for fp64 q).
        Gradients reach q, k, logits, A_log and dt_bias.
    """
    if q.is_cuda and q.dtype != torch.float64:
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        return OperatorInputsFunction.apply(
            q, k, logits, A_log.contiguous(), dt_bias.contiguous(), rotation
        )
    return operator_inputs_torch(q, k, logits, A_log, dt_bias, rotation)


def operator_inputs_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    logits: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    rotation: Rotation | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `operator_inputs` in torch, on any device."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    units = [F.normalize(rotated(x.to(dtype), rotation), dim=-1, eps=EPSILON) for x in (q, k)]
    u = torch.sigmoid(logits.to(dtype)).unsqueeze(-1) + dt_bias.to(dtype).view(q.shape[1:])
    lost = -torch.expm1(-torch.exp(A_log.to(dtype)).unsqueeze(-1) * F.softplus(u))
    square = units[1].detach().square().sum(-1).clamp(0.1, 10.0) + 1e-6
    return units[0].to(q.dtype), units[1].to(k.dtype), lost.mean(-1) / square


def rotated(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Return x `[N, H, S]` with its first channels rotated by halves."""
    if rotation is None:
        return x
    cos, sin = (t.to(x.dtype).repeat(x.shape[0] // t.shape[0], 1)[:, None] for t in rotation)
    R = cos.shape[-1]
    turned = x[..., :R]
    first, second = turned.split(R // 2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return turned if x.shape[-1] == R else torch.cat([turned, x[..., R:]], dim=-1)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
