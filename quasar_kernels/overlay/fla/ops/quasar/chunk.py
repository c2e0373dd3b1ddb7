"""Chunk-wise QuasarAttention: a segmented scan, parallel over T, in CUDA C++ or Triton.

The step over any run of tokens is affine in the state, S_out = G S_in + R, so a sequence is cut
into segments. Pass 1 computes each segment's (G, R), a short scan computes the state that
enters each segment, and pass 2 processes each segment from that state and writes the outputs. The
result is
exact: the number of segments changes only the rounding. README.md in this folder has the algebra.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

# A validator demands each of these lines and those above, used or not (contract.REQUIRED_IMPORTS).
from fla.ops.utils.index import prepare_chunk_indices
from fla.ops.quasar.forward_substitution import forward_substitution_kernel
from fla.utils import IS_AMD
from fla.utils import autocast_custom_bwd
from fla.utils import autocast_custom_fwd
from fla.utils import autotune_cache_kwargs
from fla.utils import check_shared_mem
from fla.utils import input_guard

from fla.ops.quasar.backend import cuda_backward, cuda_forward
from fla.ops.quasar.chunk_intra_token_parallel import chunk_intra, rows_packed
from fla.ops.quasar.chunk_torch import (
    LEAST_LOG_DECAY,
    chunk_quasar_torch,
    l2norm,
    sequence_lengths,
)
from fla.ops.quasar.device import on_its_device
from fla.ops.quasar.gate import divisible
from fla.ops.quasar.segments import Segments
from fla.ops.quasar.switches import Backend, requested_backend
from fla.ops.quasar.triton_kernels.plan import Plan, plan_of, plan_segments
from fla.ops.quasar.triton_kernels.segmented_scan import (
    segment_map_kernel,
    segment_output_kernel,
    segment_scan_kernel,
)
from fla.ops.quasar.triton_kernels.segmented_scan_bwd import (
    decay_grad_kernel,
    segment_input_grad_kernel,
    segment_state_grad_kernel,
)

MAX_HEAD_DIM = 128
"""Widest head that the Triton kernels hold in registers; wider heads take the torch path."""


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    # the kernels take any batch, token and head stride, so slices of a wider tensor need no copy
    return x if x.stride(-1) == 1 else x.contiguous()


def _shared_constants(plan: Plan, q: torch.Tensor) -> dict:
    # constexprs of every kernel that walks chunks
    return {
        "H": q.shape[2],
        "S": q.shape[3],
        "BS": plan.block,
        "C": plan.tiles.chunk,
        "PRECISION": plan.precision,
        "IS_VARLEN": plan.table is not None,
    }


def _rows_of_b(plan: Plan, inverse: torch.Tensor) -> int:
    # rows of B in a row of 64 elements, for the kernels that read B
    return rows_packed(plan.tiles.chunk, inverse.dtype, inverse.shape[-1])


def _segment_states(
    plan: Plan, k: torch.Tensor, v: torch.Tensor, g, inverse: torch.Tensor, initial_state
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Run pass 1 and the scan: G and the state after each segment, `[total, H, S, S]` fp32 each.

    Both are None if no sequence has a second segment. The entries of a sequence's last segment are
    not written.
    """
    if plan.total == plan.sequences:
        return None, None
    T, H, S = k.shape[1:]
    tiles = plan.tiles
    G, states = torch.empty(2, plan.total, H, S, S, dtype=torch.float32, device=k.device)
    segment_map_kernel[(plan.total * H, triton.cdiv(S, tiles.map_rows))](
        k, v, g, inverse, plan.table, G, states, T, plan.per_sequence, plan.length,
        *k.stride()[:3], *v.stride()[:3], *inverse.stride()[:3], **_shared_constants(plan, k),
        PACK=_rows_of_b(plan, inverse), BR=tiles.map_rows,
        num_warps=tiles.map_warps, num_stages=tiles.map_stages,
    )  # fmt: skip
    _scan(plan, G, states, initial_state, k.dtype, backward=False)
    return G, states


def _scan(plan: Plan, G, R, initial_state, dtype: torch.dtype, *, backward: bool) -> None:
    """Scan the maps in place: R becomes the states, or with `backward` their gradients."""
    H, S = G.shape[1:3]
    exact = dtype != torch.bfloat16
    segment_scan_kernel[(plan.sequences * H, triton.cdiv(S, plan.tiles.scan_cols))](
        G,
        R,
        initial_state,
        plan.first,
        plan.per_sequence,
        H=H,
        S=S,
        BS=plan.block,
        BV=plan.tiles.scan_cols,
        EXACT=exact,
        BACKWARD=backward,
        HAS_INITIAL=initial_state is not None,
        IS_VARLEN=plan.table is not None,
        num_warps=plan.tiles.scan_warps,
        num_stages=2 if exact else 1,
    )


def _launch_output(
    plan: Plan, q, k, v, g, inverse, initial_state, states, final_state, o, scale, *,
    v_new=False, checkpoints=None,
):  # fmt: skip
    """Run pass 2: fill `final_state` and o, `[B, T, H, S]`; with `fresh` V' is written to o."""
    T, H, S = k.shape[1:]
    tiles = plan.tiles
    segment_output_kernel[(plan.total * H, triton.cdiv(S, tiles.value_cols))](
        q, k, v, g, inverse, plan.table, states, initial_state, final_state, o, checkpoints,
        T, plan.per_sequence, plan.length, scale, *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], *o.stride()[:3], *inverse.stride()[:3], **_shared_constants(plan, k),
        PACK=_rows_of_b(plan, inverse), BV=tiles.value_cols, HAS_INITIAL=initial_state is not None,
        HAS_STATES=states is not None, STORE_FINAL=final_state is not None, STORE_FRESH=v_new,
        num_warps=tiles.output_warps, num_stages=tiles.output_stages,
    )  # fmt: skip


def chunk_quasar_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    scale: float = 1.0,
    g: torch.Tensor | None = None,
    *,
    plan: Plan,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Launch the forward kernels; q, k and v share one dtype and have a last stride of 1.

    Returns:
        o and the final state as `chunk_quasar` does, and G and the states for the backward pass.
    """
    T, H, S = q.shape[1:]
    final = None
    if output_final_state:
        final = torch.empty(plan.sequences, H, S, S, dtype=torch.float32, device=q.device)
    if plan.sequences * H == 0 or (T == 0 and not output_final_state):
        return torch.empty_like(q), final, None, None
    o = torch.empty_like(k, memory_format=torch.contiguous_format)
    # a chunk's B is stored in o's rows, unless several programs write them
    inverse = chunk_intra(plan, k, beta, o if plan.tiles.value_cols >= S else None)
    G, states = _segment_states(plan, k, v, g, inverse, initial_state)
    _launch_output(plan, q, k, v, g, inverse, initial_state, states, final, o, scale)
    return o, final, G, states


def chunk_quasar_bwd(
    q, k, v, beta, initial_state, G, states, do, d_final, scale: float, g=None, *, plan: Plan
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward kernels: dq, dk, dv, dbeta, the initial state's gradient and dg.

    The last two are None where there is no such input.

    Args:
        q, k, v, beta, initial_state, g: as in `chunk_quasar_fwd`.
        G, states: what `chunk_quasar_fwd` returned.
        do: `[B, T, H, S]` contiguous, q's dtype.
        d_final: `[sequences, H, S, S]` fp32 contiguous, or None.
    """
    T, H = q.shape[1:3]
    warps, reads_step = plan.tiles.grad_warps, beta.ndim == 3
    if reads_step:
        beta = divisible(beta, k.dtype)
    dq, dk, dv, v_new = (torch.empty_like(do) for _ in range(4))
    inverse = chunk_intra(plan, k, beta, dv)
    shared = _shared_constants(plan, q)
    checkpoints = begins = dg = None
    if g is not None:
        checkpoints, begins, dg = torch.empty_like(do), torch.empty_like(g), torch.empty_like(g)
    _launch_output(
        plan, q, k, v, g, inverse, initial_state, states, None, v_new, scale,
        v_new=True, checkpoints=checkpoints,
    )  # fmt: skip
    strides_q, strides_k = q.stride()[:3], k.stride()[:3]
    d_initial = None if initial_state is None else torch.empty_like(initial_state)
    segment_sizes = (T, plan.per_sequence, plan.length, scale)
    d_states = None if G is None else torch.empty_like(G)

    absent = (None,) * 4

    def launch_state_grad(map_only: bool) -> None:
        segment_state_grad_kernel[(plan.total * H,)](
            q, k, g, inverse, v_new, do, plan.table, d_states, d_final, d_states, d_initial, dv, dk,
            *(absent if map_only or g is None else (checkpoints, states, initial_state, begins)),
            *segment_sizes, *strides_q, *strides_k, *do.stride()[:3], *inverse.stride()[:3],
            **shared,
            PACK=_rows_of_b(plan, inverse), MAP_ONLY=map_only, HAS_FINAL=d_final is not None,
            HAS_ENTERING=d_states is not None and not map_only,
            STORE_INITIAL=d_initial is not None, num_warps=warps, num_stages=1,
        )  # fmt: skip

    if G is not None:
        launch_state_grad(map_only=True)
        _scan(plan, G, d_states, None, k.dtype, backward=True)
    launch_state_grad(map_only=False)
    d_beta = torch.empty_like(beta) if reads_step else beta.new_empty(plan.total, H)
    segment_input_grad_kernel[(plan.total * H,)](
        q, k, beta, g, v_new, do, dv, plan.table, states, initial_state, dq, dk, d_beta, dg,
        *segment_sizes, *strides_q, *strides_k, *do.stride()[:3], **shared, READ_STEP=reads_step,
        HAS_INITIAL=initial_state is not None, HAS_STATES=states is not None,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    if g is not None:
        keep = max(plan.block, plan.tiles.chunk)
        shares = max(1, min(triton.cdiv(plan.longest, keep), 64))
        decay_grad_kernel[(plan.total * H, shares)](
            dg,
            begins,
            plan.table,
            *segment_sizes[:3],
            H=H,
            KEEP=keep,
            IS_VARLEN=plan.table is not None,
            num_warps=1,
        )
    return dq, dk, dv, d_beta if reads_step else d_beta.sum(0), d_initial, dg


def _forward_with(tiles, q, k, v, beta) -> torch.Tensor:
    # for the autotune of a GPU that tuned.json does not name
    return chunk_quasar_fwd(q, k, v, beta, plan=plan_segments(q, None, tiles))[0]


def _for_each_head(q, k, v) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # repeats heads of q and k that several heads of v share
    if q.shape[2] != v.shape[2]:
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return q, k, v


class Recorded(NamedTuple):
    """A forward pass's results, and the inputs of `recorded_backward`."""

    o: torch.Tensor
    final_state: torch.Tensor | None
    saved: tuple[torch.Tensor | None, ...]  # q, k, v, beta, the initial state, G, the states, g
    cut: Plan | Segments  # the segmentation of G and the states


def recorded_forward(
    q,
    k,
    v,
    beta,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    scale=1.0,
    g=None,
    *,
    backend: Backend,
) -> Recorded:
    """Run `run_chunks`'s forward pass by kernels: CUDA C++ where that applies, else Triton.

    Args:
        q, ..., g: as `run_chunks` takes them.
        backend: QUASAR_BACKEND's value; it is read once a call.
    """
    q, k, v = (_rows_contiguous(x.to(q.dtype)) for x in (q, k, v))
    beta = beta.float().contiguous()
    initial = None if initial_state is None else initial_state.float().contiguous()
    g = None if g is None else g.float().clamp(min=LEAST_LOG_DECAY).contiguous()
    results = cuda_forward(
        backend, q, k, v, beta, initial, output_final_state, scale, cu_seqlens, g
    )
    if results is None:
        plan = plan_segments(v, cu_seqlens, launch=_forward_with)
        qkv = _for_each_head(q, k, v)
        results = (
            *chunk_quasar_fwd(*qkv, beta, initial, output_final_state, scale, g, plan=plan),
            plan,
        )
    o, final, G, states, cut = results
    return Recorded(o, final, (q, k, v, beta, initial, G, states, g), cut)


def recorded_backward(
    saved, cut, do, d_final=None, scale: float = 1.0, *, backend: Backend
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of q, k, v, beta, the initial state (or None) and g (or None).

    They are computed where the forward pass ran, or in Triton.

    Args:
        saved, cut: of `recorded_forward`'s result.
        do: like v.
        d_final: `[sequences, H, S, S]`, or None.
        backend: that of the forward pass.
    """
    q, k, v, beta, initial_state, G, states, g = saved
    if q.numel() == 0:
        zeros = [torch.zeros_like(x) for x in (q, k, v, beta)]
        d_g = None if g is None else torch.zeros_like(g)
        return *zeros, None if initial_state is None else d_final, d_g
    do = do.to(q.dtype).contiguous()
    if d_final is not None:
        d_final = d_final.float().contiguous()
    others = (beta, initial_state, G, states, do, d_final, scale)
    with torch.cuda.device(q.device):
        results = None
        if isinstance(cut, Segments):
            results = cuda_backward(backend, q, k, v, *others, cut, g)
        if results is None:
            plan = plan_of(v, cut) if isinstance(cut, Segments) else cut
            results = chunk_quasar_bwd(*_for_each_head(q, k, v), *others, g, plan=plan)
        dq, dk, *grads = results
        if q.shape[2] != v.shape[2]:
            dq, dk = (x.unflatten(2, (q.shape[2], -1)).sum(3) for x in (dq, dk))
        return dq, dk, *grads


class ChunkQuasarFunction(torch.autograd.Function):
    """Saves the inputs and one state a segment; the backward pass recomputes the rest."""

    @staticmethod
    @autocast_custom_fwd
    def forward(ctx, backend: Backend, scale: float, *arguments):
        # arguments: those of run_chunks, of which g may be missing
        o, final, saved, ctx.cut = recorded_forward(
            *arguments[:7], scale, *arguments[7:], backend=backend
        )
        ctx.save_for_backward(*saved)
        ctx.scale, ctx.backend = scale, backend
        return o, final

    @staticmethod
    @once_differentiable
    @autocast_custom_bwd
    def backward(ctx, do, d_final):
        *grads, d_g = recorded_backward(
            ctx.saved_tensors, ctx.cut, do, d_final, ctx.scale, backend=ctx.backend
        )
        return None, None, *grads, None, None, d_g


@torch.compiler.disable
@on_its_device
def chunk_quasar(
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
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply QuasarAttention (arXiv 2512.12602) to whole sequences.

    For every sequence and head, with lambda = |k_t|^2 and
    alpha = (1 - exp(-beta lambda)) / (lambda + 1e-8):
    S_t = (I - alpha k_t k_t^T) S_{t-1} + alpha k_t v_t^T and o_t = scale * S_t^T q_t.

    Args:
        q, k, v: `[B, T, H, S]`, bf16, fp16, fp32 or fp64, of any strides; T may be 0.
        beta: `[H]`, positive.
        initial_state: `[N, H, S, S]`, key dimension first, for N sequences (B without
            `cu_seqlens`); None is zero.
        output_final_state: whether to return the state after each sequence.
        cu_seqlens: `[N + 1]` int32 or int64 bounds of sequences packed in one row (B = 1), empty
            ones included.
        scale: factor of the output; the definition has 1.
        use_qk_l2norm_in_kernel: normalise q and k to unit length first; the definition does not.

    Returns:
        o `[B, T, H, S]` in q's dtype, and the final state `[N, H, S, S]` fp32 (fp64 for fp64
        inputs) or None. Gradients reach q, k, v, beta and initial_state, from both results.

    Raises:
        ValueError: shapes that do not fit one another, tensors on several devices, or
            QUASAR_BACKEND has no known value.
        CudaUnavailableError: QUASAR_BACKEND is `cuda` and the CUDA kernels do not take the call.
    """
    _check_shapes(q, k, v, beta, initial_state, cu_seqlens)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    return run_chunks(q, k, v, beta, initial_state, output_final_state, cu_seqlens, scale)


def run_chunks(
    q, k, v, beta, initial_state=None, output_final_state=False, cu_seqlens=None, scale=1.0, g=None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `chunk_quasar`, or a call with given step sizes or decays, by the chosen backend.

    Arguments that are not described here are those of `chunk_quasar`, unchecked.

    Args:
        q, k: as there; with step sizes they may have fewer heads than v, each of which neighbouring
            ones of v share then. H is v's.
        beta: `[H]`, or the step sizes themselves, `[B, T, H]`, not negative; then no key's
            step size times |k|^2 should pass 2, where the state would grow.
        g: log decays `[B, T, H]`, not positive, by which the state shrinks before each token, or
            None.
    """
    arguments = (q, k, v, beta, initial_state, output_final_state, cu_seqlens, scale, g)
    on_kernels = q.is_cuda and q.shape[-1] <= MAX_HEAD_DIM and q.dtype != torch.float64
    if not on_kernels or (backend := requested_backend()) == "torch":
        return chunk_quasar_torch(*_for_each_head(q, k, v), *arguments[3:7], scale=scale, g=g)
    inputs = (*arguments[:5], g)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return ChunkQuasarFunction.apply(backend, scale, *arguments[:7], g)
    return recorded_forward(*arguments, backend=backend)[:2]


def _check_shapes(q, k, v, beta, initial_state, cu_seqlens) -> None:
    if q.ndim != 4 or k.shape != q.shape or v.shape != q.shape:
        raise ValueError(
            f"q, k and v must share one shape [B, T, H, S]; got {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    B, T, H, S = q.shape
    if beta.shape != (H,):
        raise ValueError(f"beta must have shape [{H}], one value a head; got {tuple(beta.shape)}")
    if any(x is not None and x.device != q.device for x in (k, v, beta, initial_state)):
        raise ValueError(f"k, v, beta and initial_state must be on q's device, {q.device}")
    N = B if cu_seqlens is None else len(sequence_lengths(cu_seqlens, B, T))
    if initial_state is not None and initial_state.shape != (N, H, S, S):
        raise ValueError(
            f"initial_state must have shape {(N, H, S, S)}; got {tuple(initial_state.shape)}"
        )


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
