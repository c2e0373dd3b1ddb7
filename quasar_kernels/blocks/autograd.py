"""Autograd of an operator's kernels: the forward pass stores states for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fla.ops.quasar.device import once_differentiable
from torch import Tensor


class Forward(NamedTuple):
    """Results of a forward pass."""

    o: Tensor  # [B, T, H, V] in the values' dtype
    final_state: Tensor  # [N, H, K, V] fp32
    checkpoints: Tensor | None  # the states before some tokens, if requested


class Kernels(NamedTuple):
    """The launches of an operator.

    A `plan` has the arguments of a call other than inputs and states. `backward` takes a plan,
    inputs, the checkpoints, the contiguous gradients of o and of the final state (fp32, or None),
    and whether there is an initial state. It returns the gradients of the inputs and of the initial
    state.
    """

    inputs: Callable[..., Any]  # the type of the tuple of input tensors
    # takes a plan, inputs, the initial state, and whether to store checkpoints
    forward: Callable[[Any, Any, Tensor | None, bool], Forward]
    backward: Callable[..., tuple[Any, Tensor | None]]


class KernelsFunction(torch.autograd.Function):
    """An operator with its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, plan: Any, initial_state: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass and store checkpoints."""
        ctx.set_materialize_grads(False)
        results = kernels.forward(plan, kernels.inputs(*inputs), initial_state, True)
        ctx.kernels, ctx.plan, ctx.initial = kernels, plan, initial_state is not None
        ctx.values = results.o.shape, results.o.dtype, results.o.device
        ctx.save_for_backward(*inputs, results.checkpoints)
        return results.o, results.final_state

    @staticmethod
    @once_differentiable
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
