"""The layer's forward pass on a GPU without cached states, with the results for a backward pass.

q, k, v = silu(causal_conv(x W))        o = operator(q, k, v, softplus(beta_log))
y = (rmsnorm(o per head) * sigmoid(x W_g0 W_g1 + b)) W_o

The pass has three steps. The first and the last have several implementations, each a `Stages`.
"""

from __future__ import annotations

from typing import Any

import torch

from fla.ops.quasar.backend import MAX_HEAD_DIM, scan_forward
from fla.ops.quasar.device import WithoutAutocast
from fla.ops.quasar.layer.call import Activations, Call, LayerResults, Stages, Weights
from fla.ops.quasar.layer.hopper import program as hopper
from fla.ops.quasar.layer.hopper.program import HOPPER
from fla.ops.quasar.layer.hopper.wide_projection import WIDE
from fla.ops.quasar.layer.kernels import CONV_TAPS
from fla.ops.quasar.layer.library import LIBRARY
from fla.ops.quasar.layer.portable import program as portable
from fla.ops.quasar.layer.portable.program import PORTABLE
from fla.ops.quasar.layer.replay import MOST_ELEMENTS, Tensors, replayed

APART = 1 << 13
"""Tokens from which the last kernel is launched after the graph instead of in it.

In the graph it would write to the graph's memory, and copying y from there would take longer."""


def takes(call: Call, x: torch.Tensor, weights: Weights) -> bool:
    """Return whether the kernels support a call with these weights."""
    taps = weights.q_taps
    return (
        x.is_cuda
        and call.dtype != torch.float64
        and call.head_dim <= MAX_HEAD_DIM
        and taps is not None
        and taps.shape[-1] == CONV_TAPS
        and call.backend != "torch"
    )


def copied_as(call: Call, x: torch.Tensor, weights: Weights) -> torch.dtype:
    """Return the dtype of a graph's copy of x: the one that the call's first kernel reads."""
    fused = (
        kernels.find_program(call, x, weights) for kernels in (hopper.KERNELS, portable.KERNELS)
    )
    return x.dtype if any(fused) else call.dtype


def run_layer(call: Call, owner: object, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Compute the layer; it records nothing for autograd. Short calls are replayed as CUDA graphs.

    Args:
        call: one that the kernels support (`takes`).
        owner: the object whose lifetime bounds that of the graphs.
        x: `[B, T, hidden]`.
        weights: the layer's.
    """
    if x.numel() > MOST_ELEMENTS:
        return layer_forward(call, x, weights).y

    def compute(x: torch.Tensor, *tensors: Any) -> tuple[Tensors, Tensors]:
        return _begin(call, x, Weights(*tensors))

    def finish(*rest: torch.Tensor) -> torch.Tensor | None:  # outside of the graph
        return _finish(call, x, weights, rest) if rest else None

    def copied(x: torch.Tensor) -> torch.dtype:
        return copied_as(call, x, weights)

    # the host cuts packed sequences into segments, which a graph cannot replay
    owner = owner if call.cu_seqlens is None else None
    y, last = replayed(
        owner, compute, (x,), weights, call.dtype, call, finish=finish, copied=copied
    )
    return y[0] if y else last


def layer_forward(
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    *,
    keep: bool = False,
    output: bool = True,
    across: Any = None,
) -> LayerResults:
    """Compute the layer; it records nothing for autograd.

    Args:
        call, x, weights: as in `run_layer`.
        keep: whether to return the intermediate results.
        output: whether to compute y. Without y, `products` are not kept either, so that the
            operator's results can use their memory; a backward pass computes them again.
        across: the layer's `parallel.Neighbours` if x is one rank's slice of a sequence.
    """
    for stages in (HOPPER, WIDE, PORTABLE):
        results = _run(stages, call, x, weights, keep, output, across)
        if results is not None:
            return results
    return _run(LIBRARY, call, x, weights, keep, output, across)  # LIBRARY supports every call


def _run(
    stages: Stages,
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    keep: bool,
    output: bool,
    across: Any,
) -> Any:
    """Return `layer_forward`'s results by these stages, or None if they do not support the call."""
    with WithoutAutocast(x.device.type):
        partial = _through_operator(stages, call, x, weights, keep, output, across)
        if partial is None:
            return None
        results, tensors = partial
        if not output:
            return results
        y = stages.output(call, tensors)
        return None if y is None else results._replace(y=y.view(x.shape))


def _through_operator(
    stages: Stages,
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    keep: bool,
    output: bool,
    across: Any = None,
) -> tuple[LayerResults, Activations] | None:
    """Compute everything before the output stage; return the kept results and its inputs."""
    tensors = stages.project(call, x, weights, keep, output)
    if tensors is None or tensors.scan is None:
        return None
    if across is None:
        operator = scan_forward(tensors.scan, backend=call.backend)
    else:
        across.correct(call, x, weights, tensors.scan)
        operator = across.forward(tensors.scan, call.backend)
    tensors.scan, tensors.o = None, operator.o.flatten(0, 1)
    results = LayerResults(None)
    if keep:
        results = LayerResults(None, tensors.rows, tensors.products, tensors.narrow, operator)
    return results, tensors


def _begin(call: Call, x: torch.Tensor, weights: Weights) -> tuple[Tensors, Tensors]:
    """Compute the layer, except Hopper's last kernel in a long call.

    Returns:
        The output and an empty tuple, or an empty list and the arguments of `_finish`.
    """
    if x.shape[1] >= APART:
        with WithoutAutocast(x.device.type):
            partial = _through_operator(HOPPER, call, x, weights, keep=False, output=True)
        if partial is not None:
            tensors = partial[1]
            return [], (tensors.o, tensors.narrow, *tensors.output_weights)
    return [layer_forward(call, x, weights).y], ()


def _finish(
    call: Call, x: torch.Tensor, weights: Weights, rest: tuple[torch.Tensor, ...]
) -> torch.Tensor | None:
    """Return the layer's output from the second result of `_begin` for the same call."""
    o, narrow, *output_weights = rest
    y = HOPPER.output(call, Activations(None, narrow, tuple(output_weights), o=o))
    return layer_forward(call, x, weights).y if y is None else y.view(x.shape)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
