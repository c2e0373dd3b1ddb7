"""QuasarAttention's recurrent form: token by token, for decoding and short sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fla.ops.quasar.arguments import refuse_unknown
from fla.ops.quasar.chunk import check_arguments
from fla.ops.quasar.chunk_torch import chunk_quasar_torch, sequence_lengths
from fla.ops.quasar.device import is_recorded, on_its_device, once_differentiable
from fla.ops.quasar.gate import fused_quasar_gate, quasar_step_size
from fla.ops.quasar.operator_types import ScanInputs, StepSizes
from fla.ops.quasar.traceable import traceable
from fla.ops.quasar.preparation import Preparation, prepare

MAX_HEAD_DIM = 256
"""Widest head that the Triton kernel holds in registers; wider heads use the torch path."""
ENOUGH_PROGRAMS = 1024
"""Programs above which wider programs are faster than more programs."""
WARP_ELEMENTS, MAX_ELEMENTS = 4096, 8192
"""Most elements of a state in a program of one warp, and in one of four."""


class RecurrentTiles(NamedTuple):
    """The tiles of a launch."""

    cols: int  # state columns of a program, which holds all of their rows
    warps: int


def tiles_for(block: int, chains: int) -> RecurrentTiles:
    """Return the tiles for heads padded to `block` channels and `chains` sequences times heads.

    With few chains, many narrow programs are fastest; with many chains, few wide ones. This was
    measured on an H200 with 8 to 256 sequences of 8 heads of 64 and 128 channels.
    """
    cols, widest = 8 if chains <= 16 else 16, min(64, MAX_ELEMENTS // block)
    while cols < widest and chains * block // cols > ENOUGH_PROGRAMS:
        cols *= 2
    cols = min(cols, block)
    return RecurrentTiles(cols, 1 if block * cols <= WARP_ELEMENTS else 4)


@triton.jit(
    # calls of all lengths and layouts share one compiled kernel
    do_not_specialize=["T", *(f"stride_{x}{axis}" for x in "qkv" for axis in "bth")]
)
def fused_recurrent_quasar_fwd_kernel(
    q, k, v, beta, g, initial_state, o, final_state, cu_seqlens, T, scale,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    READ_STEP: tl.constexpr, CHANNELS: tl.constexpr, HAS_INITIAL: tl.constexpr,
    STORE_FINAL: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Process one sequence of one head for BV value columns, with the state in registers.

    Grid: (sequences * H * S / BV): adjacent programs process the columns of one state, which share
    pages of memory. q, k and v have a last stride of one; o is contiguous. `final_state` may be
    `initial_state`: a program reads its columns before it writes them.
    With READ_STEP, beta has the step size of each token and head, `[B, T, H]` contiguous. g has log
    decays in the same layout, or with CHANNELS `[B, T, H, S]`. GROUP heads of values share one head
    of keys and queries.
    """
    PARTS: tl.constexpr = tl.cdiv(S, BV)
    i_nh = tl.program_id(0) // PARTS
    i_n, i_h = (i_nh // H).to(tl.int64), i_nh % H
    if IS_VARLEN:
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first).to(tl.int32)
        i_b = i_n * 0
    else:
        first = i_n * 0
        length = T
        i_b = i_n
    rows = tl.arange(0, BS)
    cols = tl.program_id(0) % PARTS * BV + tl.arange(0, BV)
    row_mask, col_mask = rows < S, cols < S
    mask = row_mask[:, None] & col_mask[None, :]
    at = i_nh.to(tl.int64) * S * S + rows[:, None] * S + cols[None, :]
    if READ_STEP:
        p_beta = beta + (i_b * T + first) * H + i_h
    else:
        b_beta = tl.load(beta + i_h).to(tl.float32)
    if g is not None:
        p_g = g + (i_b * T + first) * H + i_h
        if CHANNELS:
            p_g = g + ((i_b * T + first) * H + i_h) * S + rows

    i_g = i_h // GROUP
    p_q = q + i_b * stride_qb + first * stride_qt + i_g * stride_qh + rows
    p_k = k + i_b * stride_kb + first * stride_kt + i_g * stride_kh + rows
    p_v = v + i_b * stride_vb + first * stride_vt + i_h * stride_vh + cols
    p_o = o + ((i_b * T + first) * H + i_h) * S + cols
    # prefetch: the first token's loads overlap with the state's, later ones with computations
    next_q = tl.load(p_q, mask=row_mask & (length > 0), other=0.0)
    next_k = tl.load(p_k, mask=row_mask & (length > 0), other=0.0)
    next_v = tl.load(p_v, mask=col_mask & (length > 0), other=0.0)
    if HAS_INITIAL:
        # a state is not read again before the next token, so it should not evict other data in L2
        state = tl.load(initial_state + at, mask=mask, other=0.0, eviction_policy="evict_first")
        state = state.to(tl.float32)
    else:
        state = tl.zeros([BS, BV], dtype=tl.float32)
    for t in range(0, length):
        b_q, b_k, b_v = next_q.to(tl.float32), next_k.to(tl.float32), next_v.to(tl.float32)
        more = t + 1 < length
        p_q += stride_qt
        p_k += stride_kt
        p_v += stride_vt
        next_q = tl.load(p_q, mask=row_mask & more, other=0.0)
        next_k = tl.load(p_k, mask=row_mask & more, other=0.0)
        next_v = tl.load(p_v, mask=col_mask & more, other=0.0)
        if READ_STEP:
            alpha = tl.load(p_beta).to(tl.float32)
            p_beta += H
        else:
            alpha = quasar_step_size(tl.sum(b_k * b_k, axis=0), b_beta)
        if g is not None:
            if CHANNELS:
                state *= tl.exp(tl.load(p_g, mask=row_mask, other=0.0).to(tl.float32))[:, None]
                p_g += H * S
            else:
                state *= tl.exp(tl.load(p_g).to(tl.float32))
                p_g += H
        # o = S_t^T q = S_{t-1}^T q + (q k) fresh: both sums use the old state, so they can overlap
        known = tl.sum(b_k[:, None] * state, axis=0)
        read = tl.sum(b_q[:, None] * state, axis=0)
        fresh = alpha * (b_v - known)
        b_o = (read + tl.sum(b_q * b_k, axis=0) * fresh) * scale
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=col_mask)
        p_o += H * S
        state += b_k[:, None] * fresh[None, :]
    if STORE_FINAL:
        tl.store(final_state + at, state, mask=mask, cache_modifier=".cs")


def launch_fused_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    scale: float = 1.0,
    inplace_state: bool = False,
    g: torch.Tensor | None = None,
    tiles: RecurrentTiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the kernel, without autograd. Arguments and results are those of `run_recurrent`.

    Args:
        tiles: replaces the choice of `tiles_for`.
    """
    B, T, H, S = v.shape
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    o = torch.empty(B, T, H, S, dtype=q.dtype, device=q.device)
    final = None
    if inplace_state and initial_state is not None:
        final = initial_state
    elif output_final_state or inplace_state:
        final = torch.empty(N, H, S, S, dtype=torch.float32, device=q.device)
    if N * H == 0 or (T == 0 and final is None):
        return o, final
    BS = 1 << (S - 1).bit_length()
    BV, warps = tiles or tiles_for(BS, N * H)
    fused_recurrent_quasar_fwd_kernel[(N * H * -(-S // BV),)](
        q, k, v, beta.contiguous(), None if g is None else g.contiguous(),
        None if initial_state is None else initial_state.contiguous(),
        o, final, cu_seqlens, T, scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        H=H, S=S, BS=BS, BV=BV, GROUP=H // q.shape[2], READ_STEP=StepSizes.of(beta).per_token,
        CHANNELS=g is not None and g.ndim == 4,
        HAS_INITIAL=initial_state is not None,
        STORE_FINAL=final is not None,
        IS_VARLEN=cu_seqlens is not None,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return o, final


def fused_recurrent_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    scale: float = 1.0,
    inplace_state: bool = False,
    g: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Process token by token in torch, in fp32, or fp64 for fp64 inputs; heads of any widths.

    Arguments and results are those of `run_recurrent`.
    """
    q, k, *_ = ScanInputs.of(q, k, v, beta).with_equal_heads()
    B, T, H, V = v.shape
    K = q.shape[-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lengths = [T] if cu_seqlens is None else sequence_lengths(cu_seqlens, B, T)
    N = B if cu_seqlens is None else len(lengths)
    if inplace_state and initial_state is not None:
        final = initial_state
    else:
        final = torch.zeros(N, H, K, V, dtype=dtype, device=q.device)
        if initial_state is not None:
            final.copy_(initial_state)
    o = torch.empty(B, T, H, V, dtype=q.dtype, device=q.device)
    k_wide, alpha = k.to(dtype), beta.to(dtype)
    if not StepSizes.of(beta).per_token:
        alpha = fused_quasar_gate(k_wide.square().sum(-1), alpha, dtype)
    alpha = alpha[..., None, None]
    decay = None
    if g is not None:
        decay = torch.exp(g.to(dtype) if g.ndim == 4 else g.to(dtype).unsqueeze(-1)).unsqueeze(-1)
    query = q.to(dtype).unsqueeze(-2)  # [B, T, H, 1, S]
    row, column, value = k_wide.unsqueeze(-2), k_wide.unsqueeze(-1), v.to(dtype).unsqueeze(-2)
    start = 0
    for n, length in enumerate(lengths):
        state = final if cu_seqlens is None else final[n : n + 1]
        for t in range(start, start + length):
            if decay is not None:
                state *= decay[:, t]
            fresh = alpha[:, t] * (value[:, t] - row[:, t] @ state)
            state += column[:, t] * fresh
            o[:, t] = (query[:, t] @ state).squeeze(-2) * scale
        start += length
    return o, final if output_final_state or inplace_state else None


def _run(q, k, v, *arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run Triton if it supports the call, otherwise torch."""
    square = q.shape[-1] == v.shape[-1] <= MAX_HEAD_DIM
    if q.is_cuda and q.dtype != torch.float64 and square:
        return launch_fused_recurrent(q, k, v, *arguments)
    with torch.autocast(q.device.type, enabled=False):
        return fused_recurrent_torch(q, k, v, *arguments)


class FusedRecurrentQuasarFunction(torch.autograd.Function):
    """Runs the recurrence; the backward pass recomputes and differentiates the torch chunk form."""

    @staticmethod
    def forward(ctx, q, k, v, beta, initial_state, g, output_final_state, cu_seqlens, scale):
        ctx.save_for_backward(q, k, v, beta, initial_state, g, cu_seqlens)
        ctx.scale = scale
        return _run(q, k, v, beta, initial_state, output_final_state, cu_seqlens, scale, False, g)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, d_final):
        *inputs, cu_seqlens = ctx.saved_tensors
        leaves = [
            None if x is None else x.detach().requires_grad_(needed)
            for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        needed_leaves = [x for x in leaves if x is not None and x.requires_grad]
        with torch.enable_grad(), torch.autocast(do.device.type, enabled=False):
            *qkv, beta, initial, g = leaves
            q, k, v, *_ = ScanInputs.of(*qkv, beta).with_equal_heads()
            o, final = chunk_quasar_torch(
                q, k, v, beta, initial, True, cu_seqlens, scale=ctx.scale, g=g
            )
            # without tokens, a result may depend on none of the inputs
            pairs = [(o, do)] if d_final is None else [(o, do), (final, d_final)]
            pairs = [(x, dx) for x, dx in pairs if x.requires_grad]
            if not pairs:
                return (None,) * len(ctx.needs_input_grad)
            outputs, grads = zip(*pairs, strict=True)
            gradients = iter(torch.autograd.grad(outputs, needed_leaves, grads, allow_unused=True))
        per_input = (next(gradients) if x is not None and x.requires_grad else None for x in leaves)
        return *per_input, None, None, None


@traceable()
@on_its_device
def fused_recurrent_quasar(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_state: bool = False,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply QuasarAttention (arXiv 2512.12602) token by token; same results as `chunk_quasar`.

    It is meant for decoding (T = 1 with a state) and short sequences, because the T steps are
    sequential. The arguments are those of `chunk_quasar`, without `cp_context` and
    `checkpoint_every`, and:

    Args:
        inplace_state: whether to return the final state, even without `output_final_state`. Unless
            autograd records the call, it overwrites `initial_state`, so that only o is allocated.

    Raises:
        ValueError: as `chunk_quasar`, but on a GPU the values of the bounds are not checked; or
            `inplace_state` with a state that is not contiguous fp32 (fp64 for fp64 inputs).
    """
    refuse_unknown(fused_recurrent_quasar, kwargs)
    check_arguments(q, k, v, beta, initial_state, cu_seqlens, scale)
    q, k, beta = prepare(Preparation(unit=use_qk_l2norm_in_kernel), q, k, beta)
    return run_recurrent(
        q, k, v, beta, initial_state, output_final_state, cu_seqlens, scale, inplace_state
    )


def run_recurrent(
    q,
    k,
    v,
    beta,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    scale=1.0,
    inplace_state=False,
    g=None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `fused_recurrent_quasar`, optionally with the caller's step sizes and decays.

    The arguments are those of `fused_recurrent_quasar`, except:

    Args:
        q, k: `[B, T, H, S]`; v may have a multiple of H heads, of which adjacent ones share a key.
        beta, g: as in `chunk.run_chunks`, but a step size may have any sign, and g may be
            `[B, T, H, K]`, log decays per channel of the keys.

    Raises:
        ValueError: `inplace_state` with a state that is not contiguous fp32 (fp64 for fp64 inputs).
    """
    inputs = (q, k, v, beta, initial_state, g)
    if is_recorded(*inputs):
        return FusedRecurrentQuasarFunction.apply(
            *inputs, output_final_state or inplace_state, cu_seqlens, scale
        )
    if inplace_state and initial_state is not None:
        _check_can_hold_final(initial_state, q.dtype)
    # for one decoded token, an autograd Function would take more host time than the kernel
    return _run(*inputs[:5], output_final_state, cu_seqlens, scale, inplace_state, g)


def _check_can_hold_final(state: torch.Tensor, dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    if state.dtype != expected or not state.is_contiguous():
        raise ValueError(
            f"inplace_state needs a contiguous initial_state of {expected}; got {state.dtype} with "
            f"strides {state.stride()}: convert it once, before the first token"
        )


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
