"""Launches of the segmented scan's Triton kernels: the forward pass and the backward pass."""

from __future__ import annotations

from typing import Any

import torch

from fla.ops.quasar.chunk_intra_token_parallel import chunk_intra, rows_packed
from fla.ops.quasar.gate import divisible
from fla.ops.quasar.operator_types import Gradients, Saved, Scan, ScanInputs, StepSizes
from fla.ops.quasar.triton_kernels.launch import Launcher, compile_ahead
from fla.ops.quasar.triton_kernels.plan import Plan, plan_segments
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

_map, _scan_maps, _output = map(
    Launcher, (segment_map_kernel, segment_scan_kernel, segment_output_kernel)
)
_state_grad, _input_grad, _decay_grad = map(
    Launcher, (segment_state_grad_kernel, segment_input_grad_kernel, decay_grad_kernel)
)


def _shared_constants(plan: Plan, q: torch.Tensor) -> dict[str, Any]:
    # constexprs of every kernel with a loop over chunks
    return {
        "H": q.shape[2],
        "S": q.shape[3],
        "BS": plan.block,
        "C": plan.tiles.chunk,
        "PRECISION": plan.precision,
        "IS_VARLEN": plan.table is not None,
    }


def _rows_of_b(plan: Plan, inverse: torch.Tensor) -> int:
    # rows of B that are stored in one row of `inverse`
    return rows_packed(plan.tiles.chunk, inverse.dtype, inverse.shape[-1])


def _segment_states(
    plan: Plan, inputs: ScanInputs, inverse: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Run pass 1 and the scan; return G and the states, `[total, H, S, S]` fp32 each.

    G has the matrix of each segment's map, and `states` the state after each segment. Both are None
    if every sequence is one segment. The entries of a sequence's last segment are not written.
    """
    if plan.total == plan.sequences:
        return None, None
    k, v, g = inputs.k, inputs.v, inputs.g
    T, H, S = k.shape[1:]
    tiles = plan.tiles
    G, states = torch.empty(2, plan.total, H, S, S, dtype=torch.float32, device=k.device)
    _map(
        (plan.total * H, -(-S // tiles.map_rows), 1),
        (k, v, g, inverse, plan.table, G, states, T, plan.per_sequence, plan.length,
         *k.stride()[:3], *v.stride()[:3], *inverse.stride()[:3]),
        _shared_constants(plan, k) | {"PACK": _rows_of_b(plan, inverse), "BR": tiles.map_rows},
        num_warps=tiles.map_warps, num_stages=tiles.map_stages,
    )  # fmt: skip
    scan_segments(plan, G, states, inputs.initial_state, k.dtype, backward=False)
    return G, states


def scan_segments(
    plan: Plan,
    G: torch.Tensor,
    R: torch.Tensor,
    initial_state: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    backward: bool,
) -> None:
    """Scan the maps in place: R becomes the states, or with `backward` their gradients."""
    H, S = G.shape[1:3]
    exact = dtype != torch.bfloat16
    _scan_maps(
        (plan.sequences * H, -(-S // plan.tiles.scan_cols), 1),
        (G, R, initial_state, plan.first, plan.per_sequence),
        {
            "H": H,
            "S": S,
            "BS": plan.block,
            "BV": plan.tiles.scan_cols,
            "EXACT": exact,
            "BACKWARD": backward,
            "HAS_INITIAL": initial_state is not None,
            "IS_VARLEN": plan.table is not None,
        },
        num_warps=plan.tiles.scan_warps,
        num_stages=2 if exact else 1,
    )


def _launch_output(
    plan: Plan,
    inputs: ScanInputs,
    inverse: torch.Tensor,
    states: torch.Tensor | None,
    o: torch.Tensor,
    final_state: torch.Tensor | None = None,
    *,
    fresh: bool = False,
    checkpoints: torch.Tensor | None = None,
) -> None:
    """Run pass 2: write `final_state`, and to `o`, `[B, T, H, S]`, the outputs.

    With `fresh`, `o` receives V' instead (defined in segmented_scan_bwd.py).
    """
    q, k, v, _, initial_state, _, scale, g = inputs
    T, H, S = k.shape[1:]
    tiles = plan.tiles
    constants = {
        "PACK": _rows_of_b(plan, inverse),
        "BV": tiles.value_cols,
        "HAS_INITIAL": initial_state is not None,
        "HAS_STATES": states is not None,
        "STORE_FINAL": final_state is not None,
        "STORE_FRESH": fresh,
    }
    _output(
        (plan.total * H, -(-S // tiles.value_cols), 1),
        (q, k, v, g, inverse, plan.table, states, initial_state, final_state, o, checkpoints,
         T, plan.per_sequence, plan.length, scale, *q.stride()[:3], *k.stride()[:3],
         *v.stride()[:3], *o.stride()[:3], *inverse.stride()[:3]),
        _shared_constants(plan, k) | constants,
        num_warps=tiles.output_warps, num_stages=tiles.output_stages,
    )  # fmt: skip


def forward(
    inputs: ScanInputs,
    output_final_state: bool = False,
    plan: Plan | None = None,
    *,
    training: bool = False,
    every: int | None = None,
) -> Scan:
    """Run the forward pass on the current stream; it records nothing for autograd.

    Args:
        inputs: with the properties that `ScanInputs` requires. Reading `cu_seqlens` synchronises.
        output_final_state: whether to return the state after each sequence.
        plan: replaces the built-in segmentation.
        training: whether a backward pass follows; its kernels are then compiled too.
        every: as in `plan_segments`.
    """
    plan = plan or plan_segments(inputs.v, inputs.cu_seqlens, every=every)
    if inputs.v.is_cuda:
        _compile_ahead(plan, inputs, output_final_state, training)
    x = inputs.with_equal_heads()
    q, k = x.q, x.k
    T, H, S = q.shape[1:]
    final = None
    if output_final_state:
        final = torch.empty(plan.sequences, H, S, S, dtype=torch.float32, device=q.device)
    if plan.sequences * H == 0 or (T == 0 and not output_final_state):
        return Scan(torch.empty_like(q), final, Saved(inputs, None, None, plan))
    o = torch.empty_like(k, memory_format=torch.contiguous_format)
    # o's rows hold a chunk's B until pass 2 writes o, unless several programs share these rows
    inverse = chunk_intra(plan, k, x.steps, o if plan.tiles.value_cols >= S else None)
    G, states = _segment_states(plan, x, inverse)
    _launch_output(plan, x, inverse, states, o, final)
    return Scan(o, final, Saved(inputs, G, states, plan))


def _compile_ahead(
    plan: Plan, inputs: ScanInputs, output_final_state: bool, training: bool
) -> None:
    q, _, v, (_, per_token), *optional = inputs
    present = tuple(x is not None for x in optional)
    layout = plan.total > plan.sequences, plan.table is not None
    key = (q.shape[2:], v.shape[2], q.dtype, per_token, present, layout, plan.tiles)
    run = (output_final_state, training)
    compile_ahead((key, run), _passes, plan, inputs, *run)


def _passes(plan: Plan, inputs: ScanInputs, output_final_state: bool, training: bool) -> None:
    scan = forward(inputs, output_final_state, plan)
    if training:
        backward(scan.saved, torch.empty_like(scan.o), scan.final_state)


def backward(saved: Saved, do: torch.Tensor, d_final: torch.Tensor | None = None) -> Gradients:
    """Run the backward pass on the current stream.

    Args:
        saved: from `forward`; its field `segments` is a `Plan`.
        do: `[B, T, H, S]` contiguous, q's dtype.
        d_final: `[sequences, H, S, S]` fp32 contiguous, or None.

    Returns:
        The gradients; those of q and k have v's shape.
    """
    inputs, G, states, plan = saved
    x = inputs.with_equal_heads()
    q, k, _, (steps, per_token), initial_state, _, scale, g = x
    T, H = q.shape[1:3]
    warps = plan.tiles.grad_warps
    if per_token:
        steps = divisible(steps, k.dtype)
    dq, dk, dv, fresh = (torch.empty_like(do) for _ in range(4))
    inverse = chunk_intra(plan, k, StepSizes(steps, per_token), dv)
    shared = _shared_constants(plan, q)
    checkpoints = begins = dg = None
    if g is not None:
        checkpoints, begins, dg = torch.empty_like(do), torch.empty_like(g), torch.empty_like(g)
    _launch_output(plan, x, inverse, states, fresh, fresh=True, checkpoints=checkpoints)
    strides_q, strides_k = q.stride()[:3], k.stride()[:3]
    d_initial = None if initial_state is None else torch.empty_like(initial_state)
    segment_sizes = (T, plan.per_sequence, plan.length, scale)
    d_states = None if G is None else torch.empty_like(G)

    def launch_state_grad(map_only: bool) -> None:
        walked = (checkpoints, states, initial_state, begins)
        walked = (None,) * 4 if map_only or g is None else walked
        constants = {
            "PACK": _rows_of_b(plan, inverse),
            "MAP_ONLY": map_only,
            "HAS_FINAL": d_final is not None,
            "HAS_ENTERING": d_states is not None and not map_only,
            "STORE_INITIAL": d_initial is not None,
        }
        _state_grad(
            (plan.total * H, 1, 1),
            (q, k, g, inverse, fresh, do, plan.table, d_states, d_final, d_states, d_initial, dv,
             dk, *walked, *segment_sizes, *strides_q, *strides_k, *do.stride()[:3],
             *inverse.stride()[:3]),
            shared | constants, num_warps=warps, num_stages=1,
        )  # fmt: skip

    if G is not None and d_states is not None:
        launch_state_grad(map_only=True)
        scan_segments(plan, G, d_states, None, k.dtype, backward=True)
    launch_state_grad(map_only=False)
    d_beta = torch.empty_like(steps) if per_token else steps.new_empty(plan.total, H)
    starts = {"HAS_INITIAL": initial_state is not None, "HAS_STATES": states is not None}
    _input_grad(
        (plan.total * H, 1, 1),
        (q, k, steps, g, fresh, do, dv, plan.table, states, initial_state, dq, dk, d_beta, dg,
         *segment_sizes, *strides_q, *strides_k, *do.stride()[:3]),
        shared | starts | {"READ_STEP": per_token}, num_warps=warps, num_stages=1,
    )  # fmt: skip
    if g is not None:
        keep = max(plan.block, plan.tiles.chunk)
        shares = max(1, min(-(-plan.longest // keep), 64))
        _decay_grad(
            (plan.total * H, shares, 1),
            (dg, begins, plan.table, *segment_sizes[:3]),
            {"H": H, "KEEP": keep, "IS_VARLEN": plan.table is not None},
            num_warps=1,
        )
    return Gradients(dq, dk, dv, d_beta if per_token else d_beta.sum(0), d_initial, dg)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
