"""Chunk-wise QuasarAttention: a segmented scan, parallel over T, in CUDA C++ or Triton.

A run of tokens maps the state by an affine map, S_out = G S_in + R, so a sequence is cut into
segments. Pass 1 computes each segment's (G, R), a short scan computes the state that enters each
segment, and pass 2 processes each segment from that state and writes the outputs. The result is
exact: the number of segments changes only the rounding. README.md has the algebra.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

# Validators require these lines and those above, even if unused (contract.REQUIRED_IMPORTS).
from fla.ops.utils.index import prepare_chunk_indices
from fla.ops.quasar.forward_substitution import forward_substitution_kernel
from fla.utils import IS_AMD
from fla.utils import autocast_custom_bwd
from fla.utils import autocast_custom_fwd
from fla.utils import autotune_cache_kwargs
from fla.utils import check_shared_mem
from fla.utils import input_guard

from fla.ops.quasar import torch_private
from fla.ops.quasar.arguments import (
    check_state,
    expect,
    expect_heads,
    expect_number,
    refuse_unknown,
)
from fla.ops.quasar.backend import has_kernels, prepare_training, scan_backward, scan_forward
from fla.ops.quasar.checkpoints import check_every, run_with_checkpoints
from fla.ops.quasar.chunk_torch import chunk_quasar_torch, sequence_lengths
from fla.ops.quasar.cuda.scan.scan_forward import step_options
from fla.ops.quasar.device import is_recorded, on_its_device, once_differentiable
from fla.ops.quasar.operator_types import Saved, ScanInputs
from fla.ops.quasar.preparation import (
    UNCHANGED,
    Preparation,
    Prepared,
    compile_preparation,
    launch_preparation,
    launch_preparation_grad,
    prepare,
)
from fla.ops.quasar.switches import Backend, requested_backend
from fla.ops.quasar.traceable import traceable


class ChunkQuasarFunction(torch.autograd.Function):
    """Saves the inputs and one state per segment; the backward pass recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any, backend: Backend, output_final_state: bool, how: Preparation, *inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the forward pass on `inputs`, those of `ScanInputs` with beta in place of steps."""
        x, kept = _prepared(how, inputs, training=True)
        o, final, saved = scan_forward(x, output_final_state, backend=backend, training=True)
        ctx.save_for_backward(*kept, *saved.tensors())
        ctx.call = how, saved.segments, x.scale, backend
        return o, final

    @staticmethod
    @once_differentiable
    @on_its_device
    def backward(ctx: Any, do: torch.Tensor, d_final: torch.Tensor | None) -> Any:
        """Return the gradients of `forward`'s arguments."""
        inverse, logits, *tensors = ctx.saved_tensors
        how, segments, scale, backend = ctx.call
        saved = Saved.of(tensors, segments, scale)
        dq, dk, dv, d_beta, d_initial, d_g = scan_backward(saved, do, d_final, backend=backend)
        if how != UNCHANGED:
            x = saved.inputs
            prepared = Prepared(x.q, x.k, x.steps.values, inverse, logits)
            dq, dk, d_beta = launch_preparation_grad(how, prepared, dq, dk, d_beta)
        return None, None, None, dq, dk, dv, d_beta, d_initial, None, None, d_g


_apply = torch_private.apply_of(ChunkQuasarFunction)
_known: set[Any] = set()  # kinds of calls for which the compilation of all kernels has started


def _prepared(
    how: Preparation, inputs: Sequence[Any], training: bool = False
) -> tuple[ScanInputs, tuple[Any, ...]]:
    """Return the operator's inputs, and the tensors that only the preparation's gradients need.

    The first call of a kind starts to compile all kernels in parallel.
    """
    q, k, v, beta, *rest = inputs
    kind = q.device, q.dtype, q.shape[2:], v.shape[2:], beta.ndim, rest[-1] is None, how, training
    if kind not in _known and q.is_cuda:
        _known.add(kind)
        options = step_options(ScanInputs.of(*inputs))
        prepare_training(v, *v.shape[2:], options, training=training)
        if how != UNCHANGED:
            compile_preparation(how, q, k, beta, training)
    if how == UNCHANGED:
        return ScanInputs.of(*inputs), (None, None)
    q, k, beta, *kept = launch_preparation(how, q, k, beta)
    return ScanInputs.of(q, k, v, beta, *rest), tuple(kept)


@traceable(in_cuda_graphs=False)
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
    cp_context: Any = None,
    checkpoint_every: int | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
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
        cu_seqlens: `[N + 1]` int32 or int64 bounds of sequences packed in one row (B = 1), which
            may be empty. Values on a GPU are read once for each version of the tensor. Collectives
            such as `dist.broadcast` write without a new version: pass a new tensor after them.
        scale: factor of the output; the definition has 1.
        use_qk_l2norm_in_kernel: normalise q and k to unit length first; the definition does not.
        cp_context: from `parallel.context.build_cp_context` or fla's function of that name. The
            tensors are then this rank's slice of packed sequences, and the context's bounds replace
            cu_seqlens. States are those of the slice's sequences (`parallel.chunks.run_parallel`).
        checkpoint_every: n, to return also the states after every n tokens of each sequence. On a
            GPU, this takes one pass if n is a multiple of 128 and autograd does not record the
            call; otherwise one pass for every n tokens.

    Returns:
        o `[B, T, H, S]` in q's dtype, and the final state `[N, H, S, S]` fp32 (fp64 for fp64
        inputs) or None. With `checkpoint_every`, also the checkpoints `[B, T // n, H, S, S]`; those
        of packed sequences follow one another in one row. Gradients reach q, k, v, beta and
        initial_state, from all results.

    Raises:
        ValueError: an unknown keyword argument, shapes that do not fit one another, another dtype,
            no heads or channels, tensors on several devices, bounds that do not rise from 0 to T,
            `checkpoint_every` below 1 or with a `cp_context`, or an unknown value of
            QUASAR_BACKEND.
        CudaUnavailableError: QUASAR_BACKEND is `cuda`, and the CUDA kernels do not support the call
            or fail.
        RuntimeError: the exchange with other ranks failed.
    """
    refuse_unknown(chunk_quasar, kwargs)
    if cp_context is not None:
        cu_seqlens = cp_context.cu_seqlens_cpu
    check_arguments(q, k, v, beta, initial_state, cu_seqlens, scale)
    if cu_seqlens is not None:
        sequence_lengths(cu_seqlens, *q.shape[:2])  # refuses bounds that do not fit
    how = Preparation(unit=use_qk_l2norm_in_kernel)
    if checkpoint_every is not None:
        check_every(checkpoint_every, cp_context)
        o, final, checkpoints = run_with_checkpoints(
            checkpoint_every, q, k, v, beta, initial_state, cu_seqlens, scale, how=how
        )
        return o, final if output_final_state else None, checkpoints
    states = initial_state, output_final_state
    return run_chunks(q, k, v, beta, *states, cu_seqlens, scale, cp_context=cp_context, how=how)


def run_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    scale: float = 1.0,
    g: torch.Tensor | None = None,
    cp_context: Any = None,
    how: Preparation = UNCHANGED,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `chunk_quasar`, optionally with the caller's step sizes and decays.

    The arguments are those of `chunk_quasar` (they are not checked), except:

    Args:
        q, k: with step sizes they may have fewer heads than v; adjacent heads of v then share one.
            H is the number of heads of v.
        beta: `[H]`, or step sizes `[B, T, H]`, not negative. Where a step size times |k|^2 exceeds
            2, the state grows.
        g: log decays `[B, T, H]`, not positive, of the state before each token, or None.
        how: what is computed from q, k and beta first.
    """
    if cp_context is not None:
        q, k, beta = prepare(how, q, k, beta)
        from fla.ops.quasar.parallel.chunks import run_parallel  # imports torch.distributed

        return run_parallel(
            cp_context, output_final_state, q, k, v, beta, initial_state, None, scale, g
        )
    if not has_kernels(q) or (backend := requested_backend()) == "torch":
        q, k, beta = prepare(how, q, k, beta)
        q, k, *_ = ScanInputs.of(q, k, v, beta).with_equal_heads()
        return chunk_quasar_torch(
            q, k, v, beta, initial_state, output_final_state, cu_seqlens, scale=scale, g=g
        )
    inputs = (q, k, v, beta, initial_state, cu_seqlens, scale, g)
    if is_recorded(q, k, v, beta, initial_state, g):
        apply = ChunkQuasarFunction.apply if torch_private.transforms_active() else _apply
        return apply(backend, output_final_state, how, *inputs)
    return scan_forward(_prepared(how, inputs)[0], output_final_state, backend=backend)[:2]


def check_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
) -> None:
    """Raise ValueError for arguments that do not fit; the bounds' values are not read."""
    expect("q", q, ("B", "T", "H", "S"))
    device, (B, _, H, S) = q.device, q.shape
    expect("k, like q,", k, q.shape, device)
    expect("v, like q,", v, q.shape, device)
    expect_heads(q, v)
    expect("beta, one value per head,", beta, (H,), device)
    check_state(initial_state, cu_seqlens, B, (H, S, S), device)
    expect_number("scale", scale)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
