"""Calls of WKV6 and SSD by their Triton kernels: what is launched, and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quasar_kernels.blocks.triton_segments.plan import Plan, Shape, Tiles, plan_call


class Forward(NamedTuple):
    """Results of a forward pass."""

    o: Tensor  # [B, T, H, V] in the values' dtype
    final_state: Tensor  # [N, H, K, V] fp32
    checkpoints: Tensor | None  # [chunks, H, V, K], the states before them, if requested


class Kernels(NamedTuple):
    """The launches of an operator; `inputs` makes the tuple of its tensors that they take."""

    inputs: Callable[..., Any]
    forward: Callable[[Plan, Any, Tensor | None, bool], Forward]
    backward: Callable[..., tuple[Any, Tensor | None]]
    step: Callable[[Any, Tensor | None, Tiles], tuple[Tensor, Tensor]]


class SegmentsFunction(torch.autograd.Function):
    """An operator with its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, plan: Plan, initial_state: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass and keep the state before each chunk."""
        ctx.set_materialize_grads(False)
        results = kernels.forward(plan, kernels.inputs(*inputs), initial_state, True)
        ctx.kernels, ctx.plan, ctx.initial = kernels, plan, initial_state is not None
        ctx.values = results.o.shape, results.o.dtype, results.o.device
        ctx.save_for_backward(*inputs, results.checkpoints)
        return results.o, results.final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute all gradients."""
        *inputs, checkpoints = ctx.saved_tensors
        shape, dtype, device = ctx.values
        with torch.cuda.device(device):
            if do is None:
                do = torch.zeros(shape, dtype=dtype, device=device)
            last = None if d_final is None else d_final.float().contiguous()
            x, plan = ctx.kernels.inputs(*inputs), ctx.plan
            gradients, d_initial = ctx.kernels.backward(
                plan, x, checkpoints, do.contiguous(), last, ctx.initial
            )
        return (None, None, d_initial, *gradients)


def apply(
    kernels: Kernels,
    shape: Shape,
    tiles: Tiles,
    inputs: tuple[Tensor | None, ...],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    segments: int | None,
) -> tuple[Tensor, Tensor]:
    """Compute a call, differentiably.

    Args:
        segments: replaces the built-in number of segments of each sequence.

    Raises:
        ValueError: the bounds `cu_seqlens` do not fit one row of T tokens.
    """
    state = None if initial_state is None else initial_state.float().contiguous()
    tensors = [x for x in (*inputs, state) if x is not None]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if not recorded and shape.T == 1 and cu_seqlens is None:
        return kernels.step(inputs, state, tiles)
    plan = plan_call(shape, tensors[0].device, cu_seqlens, segments, tiles)
    if not recorded:
        run = kernels.forward(plan, inputs, state, False)
        return run.o, run.final_state
    results: tuple[Tensor, Tensor] = SegmentsFunction.apply(kernels, plan, state, *inputs)
    return results
