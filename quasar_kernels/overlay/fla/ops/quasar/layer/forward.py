"""The layer's forward pass without cached states, with the results for a backward pass.

q, k, v = silu(causal_conv(x W))        o = operator(q, k, v, softplus(beta_log))
y = (rmsnorm(o per head) * sigmoid(x W_g0 W_g1 + b)) W_o

paths.py chooses the kernels before and after the operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fla.ops.quasar import torch_private
from fla.ops.quasar.backend import scan_forward
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.layer import graphs, hopper, library, paths, portable
from fla.ops.quasar.layer.call import Call, Projected, Results, Weights
from fla.ops.quasar.layer.graphs import Inputs, Operation, Tensors, launch_or_replay
from fla.ops.quasar.layer.products import concatenate_weights
from fla.ops.quasar.operator_types import Scan, ScanInputs, StepSizes

if TYPE_CHECKING:
    from fla.ops.quasar.layer.rank_slice import RankSlice  # imports torch.distributed

FINISH_TOKENS = 1 << 13
"""From this many tokens on, a graph ends before the last kernel; `_finish_forward` launches it.

Within the graph, that kernel would write y to the graph's memory. To copy y from there takes longer
than a launch."""


def run(call: Call, owner: object, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Compute the layer; it records nothing for autograd. Short calls are replayed as CUDA graphs.

    Args:
        call: the settings.
        owner: the graphs are dropped together with this object.
        x: `[B, T, hidden]`.
        weights: the layer's.
    """
    if x.numel() > graphs.MAX_ELEMENTS:
        return layer_forward(call, x, weights).y
    # the host cuts packed sequences into segments, which a graph cannot replay
    owner = owner if call.cu_seqlens is None else None
    outputs, finished = launch_or_replay(owner, FORWARD, call, (x,), weights, call.dtype)
    return outputs[0] if outputs else finished  # y, by the graph or by `_finish_forward`


def is_short(call: Call, x: torch.Tensor) -> bool:
    """Return whether a call may be replayed as a CUDA graph (graphs.py)."""
    return call.cu_seqlens is None and call.dtype.itemsize == 2 and x.numel() <= graphs.MAX_ELEMENTS


def layer_forward(
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    *,
    save: bool = False,
    output: bool = True,
    rank: RankSlice | None = None,
) -> Results:
    """Compute the layer; it records nothing for autograd.

    Args:
        call, x, weights: as in `run`.
        save: whether to return the intermediate results.
        output: whether to compute y. Without y, `products` are not saved either, so that the
            operator's results can use their memory; a backward pass computes them again.
        rank: x is this rank's slice of a sequence, and its halo is gathered.
    """
    with torch_private.no_autocast():
        found = through_operator(
            call, x, weights, save=save, save_products=save and output, rank=rank
        )
        if found is None:
            return Results(library.layer_with_states(call, x, weights)[0])
        path, p, operator = found
        del found
        saved = (p.rows, p.products, p.narrow, operator) if save else ()
        o = operator.o.flatten(0, 1)
        del operator  # its inputs take gigabytes for a million tokens
        if not output:
            return Results(None, *saved)
        try:
            y = path.kernels.output(path.program, call, o, p, x.shape)
        except CudaUnavailableError as error:
            path.failed(error, call)
            # not the whole call again: on a rank, the others would not take part in its exchange
            _, *others = concatenate_weights(weights, call.dtype)
            p.output_weights = library.output_weights(weights, others)
            y = library.output(None, call, o, p, x.shape)
    return Results(y, *saved)


def through_operator(
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    *,
    save: bool = False,
    save_products: bool = False,
    rank: RankSlice | None = None,
) -> tuple[paths.Path, Projected, Scan] | None:
    """Compute everything before the output stage; None if `paths.choose` returns None.

    `save` and `save_products` are those of `library.project`, the others those of `layer_forward`.
    """
    while True:
        path = paths.choose(call, x, weights)
        if path is None:
            return None
        try:
            p = path.kernels.project(path.program, call, x, weights, save, save_products)
            break
        except CudaUnavailableError as error:
            path.failed(error, call)  # `choose` then returns others
    q, k, v = p.qkv.view(*x.shape[:2], 3, call.heads, call.head_dim).unbind(2)
    p.qkv = None
    inputs = ScanInputs(q, k, v, StepSizes(p.beta, False), cu_seqlens=call.cu_seqlens)
    if rank is None:
        return path, p, scan_forward(inputs, backend=call.backend)
    rank.replace_first_tokens(call, x, weights, inputs)
    return path, p, rank.forward(inputs, call.backend, save)


def _compute_forward(call: Call, inputs: Inputs, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Compute the layer, except Hopper's last kernel in a long call.

    Returns:
        The output and an empty tuple, or an empty list and what `_finish_forward` reads.
    """
    x, weights = inputs[0], Weights(*tensors)
    if x.shape[1] >= FINISH_TOKENS:
        with torch_private.no_autocast():
            path = paths.choose(call, x, weights)
            if path is not None and path.kernels is hopper:
                found = through_operator(call, x, weights)
                if found is not None and found[0].kernels is hopper:  # no launch failed
                    _, p, operator = found
                    return [], (operator.o.flatten(0, 1), p.narrow, *p.output_weights)
    return [layer_forward(call, x, weights).y], ()


def _finish_forward(call: Call, inputs: Inputs, tensors: Tensors, rest: Tensors) -> Any:
    """Return the layer's output from the second result of `_compute_forward` for the same call."""
    x, (o, narrow, *output_weights) = inputs[0], rest
    program = hopper.find_program(x, call.dtype)
    p: Any = Projected(None, None, narrow, tuple(output_weights))
    if program is not None:
        try:
            return hopper.output(program, call, o, p, x.shape)
        except CudaUnavailableError as error:
            paths.Path(hopper, program).failed(error, call)
    return layer_forward(call, x, Weights(*tensors)).y


def input_dtype(call: Call, x: torch.Tensor, weights: Weights) -> torch.dtype:
    """Return the dtype of a graph's copy of x: the one that the call's first kernel reads."""
    path = paths.choose(call, x, weights)
    return x.dtype if path is not None and path.kernels in (hopper, portable) else call.dtype


def _input_dtypes(call: Call, inputs: Inputs, tensors: Tensors) -> list[torch.dtype]:
    return [input_dtype(call, inputs[0], Weights(*tensors))]


FORWARD = Operation(_compute_forward, _finish_forward, _input_dtypes)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
