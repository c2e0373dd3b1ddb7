"""The layer as one node of autograd.

The node saves the input and the parameters. `saves_results` decides whether it also saves
intermediate results. Otherwise the backward pass computes them again.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from fla.ops.quasar import switches, torch_private
from fla.ops.quasar.device import on_its_device, once_differentiable
from fla.ops.quasar.layer import graphs, paths
from fla.ops.quasar.layer.backward import BACKWARD, gradients_by_torch, layer_gradients
from fla.ops.quasar.layer.call import Call, Results, Weights
from fla.ops.quasar.layer.forward import is_short, layer_forward, run
from fla.ops.quasar.layer.graphs import Inputs, launch_or_replay
from fla.ops.quasar.layer.library import MANY_TOKENS
from fla.ops.quasar.layer.products import product_in

if TYPE_CHECKING:
    from fla.ops.quasar.layer.rank_slice import RankSlice  # imports torch.distributed

SAVED_MIB = 3072
"""Default of QUASAR_KEEP_MIB: 380,000 tokens of 512 channels, 190,000 of 1,024."""

_COUNT = len(Weights._fields)

MAX_WORK = 1 << 34
"""A backward pass with saved results is replayed up to this many tokens times channels squared.

Its time on the GPU is proportional to that number: 65,536 tokens of 512 channels take 2 ms. In
longer passes the GPU does not wait for the host, so a graph would only take memory.
"""


def record(
    call: Call, owner: object, x: torch.Tensor, weights: Weights, rank: RankSlice | None = None
) -> torch.Tensor:
    """Compute the layer as `run` does, or on a rank's slice; autograd records one node."""
    apply = LayerFunction.apply if torch_private.transforms_active() else _apply
    return apply(call, owner, rank, x, *weights)


class LayerFunction(torch.autograd.Function):
    """Saves the input and the weights, and intermediate results if `saves_results` allows it."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, owner: object, rank: RankSlice | None, x: torch.Tensor, *tensors: Any
    ) -> torch.Tensor:
        """Compute the layer."""
        weights = Weights(*tensors)
        # a weak reference, because a layer that stores its output would otherwise never be freed
        ctx.call, ctx.rank, ctx.segments, ctx.owner = call, rank, None, weakref.ref(owner)
        if rank is not None:
            rank.halo = rank.gather_halo(x)
        if saves_results(call, x, weights, rank):
            y, *saved, operator = layer_forward(call, x, weights, save=True, rank=rank)
            ctx.segments = operator.saved.segments
            ctx.save_for_backward(x, *tensors, *saved, operator.o, *operator.saved.tensors())
            return y
        ctx.save_for_backward(x, *tensors)
        if rank is None:
            return run(call, owner, x, weights)
        return layer_forward(call, x, weights, rank=rank).y

    @staticmethod
    @once_differentiable
    @on_its_device
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """Return the gradients of `forward`'s arguments, by a CUDA graph if possible."""
        call, rank, segments = ctx.call, ctx.rank, ctx.segments
        needed = ctx.needs_input_grad[3:]
        x, *tensors = ctx.saved_tensors
        weights, saved = Weights(*tensors[:_COUNT]), tensors[_COUNT:]
        with torch_private.no_autocast():
            if rank is not None:
                results = Results.of(saved, segments)
                d_weights, factors = layer_gradients(call, x, weights, results, dy, needed, rank)
                dx = product_in(*factors, x.dtype).view(x.shape)
                rank.exchange_halo_gradients(dx)
            elif not paths.supports_kernels(call, x, weights):
                dx, d_weights = gradients_by_torch(call, x, weights, dy, needed)
            else:
                inputs: Inputs = (x, dy)
                max_elements = graphs.MAX_ELEMENTS
                if segments is not None:  # large results, which a graph reads without a copy
                    inputs, tensors = (), (x, dy, *tensors)
                    max_elements = MAX_WORK // x.shape[-1]
                owner = ctx.owner() if call.cu_seqlens is None else None
                settings = call, segments, needed, x.dtype
                d_weights, dx = launch_or_replay(
                    owner, BACKWARD, settings, inputs, tensors, call.dtype, max_elements
                )
        return None, None, None, dx, *d_weights


_apply = torch_private.apply_of(LayerFunction)  # without a search that only torch.func needs


def saves_results(
    call: Call, x: torch.Tensor, weights: Weights, rank: RankSlice | None = None
) -> bool:
    """Return whether a call saves its intermediate results for its backward pass.

    It does if kernels compute the call and the results need at most QUASAR_KEEP_MIB (default 3072).
    The results are x in the products' dtype, the projections before and after the convolution, and
    the operator's output. All are counted, although Hopper's kernels save fewer. Short calls that
    may be replayed as CUDA graphs (graphs.py) save nothing, because the next replay overwrites all
    intermediate results. The decision depends only on the call's settings and shapes, so both
    passes of activation checkpointing save the same. On a rank, the longest slice decides, because
    a backward pass that repeats the forward pass needs the other ranks.

    Raises:
        ValueError: QUASAR_KEEP_MIB is not a whole number.
    """
    if rank is None and is_short(call, x):
        return False
    limit = switches.keep_mib(SAVED_MIB)
    tokens, width = x.numel() // max(1, x.shape[-1]), call.heads * call.head_dim
    if rank is not None:
        tokens = rank.place.longest
    size = call.dtype.itemsize
    product = 4 if tokens < MANY_TOKENS else size  # `multiply` keeps few tokens in fp32
    token = size * (x.shape[-1] + 4 * width + call.head_dim) + product * (3 * width + call.head_dim)
    return tokens * token <= limit << 20 and paths.supports_kernels(call, x, weights)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
