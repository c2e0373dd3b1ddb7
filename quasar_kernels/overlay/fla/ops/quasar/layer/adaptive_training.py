"""The adaptive layer as one node of autograd: its gradients by products and kernels.

The operator's gradients are fp16, as its inputs are (adaptive.py). A power of two brings them into
fp16's range (`gradient_scale`); the convolution's gradient removes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fla.ops.quasar import switches, torch_private
from fla.ops.quasar.backend import scan_backward
from fla.ops.quasar.device import on_its_device, once_differentiable
from fla.ops.quasar.layer.adaptive import AdaptiveResults, adaptive_forward, rows_of, run_adaptive
from fla.ops.quasar.layer.adaptive_memory import run_saving, saved_factors, saved_results
from fla.ops.quasar.layer.autograd import SAVED_MIB
from fla.ops.quasar.layer.backward import output_stage_gradients
from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.layer.first_step import AdaptiveWeights, prepare
from fla.ops.quasar.layer.gradients import launch_conv_silu_grad
from fla.ops.quasar.layer.graphs import Inputs, Operation, Tensors, launch_or_replay
from fla.ops.quasar.layer.library import positions
from fla.ops.quasar.layer.operator_inputs import Rotation, launch_operator_inputs_grad
from fla.ops.quasar.layer.products import over_tokens, product_in
from fla.ops.quasar.operator_types import Saved
from fla.ops.quasar.segments import Segments

_WEIGHTS = len(Weights._fields) + 2
SHORT = 1 << 22
"""Largest input of a call for which the graph of the backward pass computes the forward pass again:
2,730 tokens of 1,536 channels. Longer calls save their results (adaptive_memory.py)."""
MAX_WORK = 1 << 36
"""A backward pass with saved results is replayed up to this many tokens times channels squared.
16,384 tokens of 1,536 channels are half as many, and take 1.7 ms on an H200."""


def is_short(call: Call, x: torch.Tensor) -> bool:
    """Return whether a call is so short that its backward pass repeats the forward pass."""
    return call.cu_seqlens is None and x.numel() <= SHORT


def saves_results(call: Call, x: torch.Tensor) -> bool:
    """Return whether a call saves its intermediate results for its backward pass.

    It does if it is not short and the results need at most QUASAR_KEEP_MIB.
    """
    if is_short(call, x):
        return False
    tokens, width = x.numel() // max(1, x.shape[-1]), call.heads * call.head_dim
    token = 2 * (x.shape[-1] + 7 * width + call.head_dim + call.heads) + 12 * call.heads
    return tokens * token <= switches.keep_mib(SAVED_MIB) << 20


class AdaptiveFunction(torch.autograd.Function):
    """Saves the intermediate results, or only the input and the weights (`saves_results`)."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, owner: object, rotation: Rotation | None, x: Any, *tensors: Any
    ) -> torch.Tensor:
        """Compute the layer."""
        weights = AdaptiveWeights.of(tensors)
        # a weak reference, because a layer that stores its output would otherwise never be freed
        ctx.call, ctx.rotation, ctx.segments, ctx.owner = call, rotation, None, weakref.ref(owner)
        ctx.shape, ctx.dtype, ctx.saves = x.shape, x.dtype, saves_results(call, x)
        if x.is_cuda:
            prepare(call, rotation, x, weights)
        if not ctx.saves:
            ctx.save_for_backward(*tensors, x)
            return run_adaptive(call, owner if is_short(call, x) else None, rotation, x, weights)
        with torch_private.no_autocast():
            y, ctx.segments, saved = run_saving(call, owner, rotation, x, weights)
        ctx.save_for_backward(*tensors, *saved)
        return y

    @staticmethod
    @once_differentiable
    @on_its_device
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """Return the gradients of `forward`'s arguments, by a CUDA graph if possible."""
        call, rotation, segments, tensors = ctx.call, ctx.rotation, ctx.segments, ctx.saved_tensors
        settings = call, segments, ctx.shape, ctx.needs_input_grad[3:], ctx.dtype
        owner: Any = ctx.owner()
        if not ctx.saves:
            *tensors, x = tensors
            inputs: Inputs = (dy, x, *(rotation or ()))
            owner, most = owner if is_short(call, x) else None, SHORT
        else:  # large results, which a graph reads without a copy
            inputs, most = (), MAX_WORK // dy.shape[-1]
            tensors = (dy, *(rotation or (None, None)), *tensors)
            if (bounds := call.cu_seqlens) is not None:  # a graph cannot read values on the host
                even = isinstance(segments, Segments)
                even = even and segments.are_even(dy.shape[1], call.head_dim)
                owner = owner if even and bounds.is_cuda else None
        with torch_private.no_autocast():
            gradients, (dx, (q, k, v, gate_down, step)) = launch_or_replay(
                owner, BACKWARD, settings, inputs, tensors, call.dtype, most
            )
        layer, _, dt_bias = AdaptiveWeights.of(gradients)
        layer = layer._replace(q=q, k=k, v=v, gate_down=gate_down)
        return None, None, None, dx, *AdaptiveWeights(layer, step, dt_bias).tensors()


_apply = torch_private.apply_of(AdaptiveFunction)


def record_adaptive(
    call: Call, owner: object, rotation: Rotation | None, x: torch.Tensor, weights: AdaptiveWeights
) -> torch.Tensor:
    """Compute the layer as `run_adaptive` does; autograd records one node."""
    apply = AdaptiveFunction.apply if torch_private.transforms_active() else _apply
    return apply(call, owner, rotation, x, *weights.tensors())


def _compute_backward(settings: Any, inputs: Inputs, tensors: Tensors) -> tuple[Tensors, Tensors]:
    call, segments, shape, needed, _ = settings
    if inputs:
        dy, x, *tables = inputs
        weights, rotation = AdaptiveWeights.of(tensors), Rotation(*tables) if tables else None
        rows = rows_of(call, x)
        results, saved = adaptive_forward(call, rotation, shape, rows, weights, save=True)
    else:
        dy, cos, sin, *others = list[Any](tensors)
        rotation = None if cos is None else Rotation(cos, sin)
        weights, kept = AdaptiveWeights.of(others[:_WEIGHTS]), others[_WEIGHTS:]
        results, maps = saved_results(call, shape, weights, kept)
        saved = Saved(results.scan_inputs(call, shape), *maps, segments)
    gradients, d_products = _gradients(call, rotation, shape, weights, results, saved, dy)
    present = zip(gradients.tensors(), weights.tensors(), needed[1:], strict=True)
    outputs = [
        d.to(w.dtype) if d is not None and w is not None and use else None for d, w, use in present
    ]
    # saved results are not in the graph's memory: `_finish_backward` reads them from the tensors
    return outputs, (d_products, results.product, results.rows) if inputs else (d_products,)


def _finish_backward(settings: Any, inputs: Inputs, tensors: Tensors, rest: Tensors) -> Any:
    """Return the gradients of x and of the first product's weights, None for those not needed."""
    call, _, shape, needed, dtype = settings
    d_products, *factors = list[Any](rest)
    weights = AdaptiveWeights.of(tensors if inputs else tensors[3 : 3 + _WEIGHTS])
    if not inputs:
        factors = list(saved_factors(call, shape, weights, tensors[3 + _WEIGHTS :]))
    product, rows = factors
    dx = product_in(d_products, product, dtype).view(shape) if needed[0] else None
    uses = AdaptiveWeights.of(needed[1:]).first()
    if not any(uses):
        return dx, [None] * 5
    width, S = call.heads * call.head_dim, call.head_dim
    sizes = [width] * 3 + [S, call.heads, len(product) - 3 * width - S - call.heads]
    parts = over_tokens(d_products, rows).split(sizes)  # with the padding, for alignment
    return dx, [
        d.to(w.dtype) if use else None
        for d, w, use in zip(parts, weights.first(), uses, strict=False)
    ]


def _input_dtypes(settings: Any, inputs: Inputs, tensors: Tensors) -> list[torch.dtype]:
    dtype = settings[0].dtype
    return [dtype, dtype, *(table.dtype for table in inputs[2:])] if inputs else []


BACKWARD = Operation(_compute_backward, _finish_backward, _input_dtypes)
"""The gradients. The outputs are those of the weights that are not in the first product. Those of x
and of the product's weights are large: `_finish_backward` computes them outside of the graph.

The settings are (call, segments of the saved results or None, x's shape, which gradients are
needed, x's dtype). Without saved results, dy, x and the rotation's tables are inputs, and the
tensors are the weights. With them, the tensors are dy, the tables, the weights, and the results."""


def _gradients(
    call: Call,
    rotation: Rotation | None,
    shape: torch.Size,
    weights: AdaptiveWeights,
    results: AdaptiveResults,
    saved: Saved,
    dy: torch.Tensor,
) -> tuple[AdaptiveWeights, torch.Tensor]:
    """Return the weights' fp32 gradients but the first product's, and that product's gradient."""
    B, T, D = shape
    R, H, S, dtype = B * T, call.heads, call.head_dim, call.dtype
    layer, channels = weights.layer, 3 * H * S
    _, products, _, narrow, logits, lengths, _, o, product, *gate_weights, out_weight = results

    do, d_gate, (d_up, d_bias, d_norm, d_out), largest = output_stage_gradients(
        call,
        o.view(R, H, S),
        narrow,
        gate_weights,
        layer.norm,
        out_weight,
        dy.reshape(R, D).to(dtype),
        scaled=True,
    )
    d_products = torch.empty(R, product.shape[0], dtype=dtype, device=dy.device)
    torch.mm(d_gate, gate_weights[0], out=d_products[:, channels : channels + S])
    d_products[:, channels + S + H :].zero_()
    del d_gate

    dq, dk, dv, d_step, *_ = scan_backward(saved, do.view(B, T, H, S), backend=call.backend)
    q, k = (t.flatten(0, 1) for t in saved.inputs[:2])
    dq, dk, d_A, d_dt = launch_operator_inputs_grad(
        q, k, lengths, logits[:, :H], layer.beta_log, weights.dt_bias, rotation,
        dq.view(R, H, S), dk.view(R, H, S), d_step.view(R, H).contiguous(),
        d_products[:, channels + S : channels + S + H], largest,
    )  # fmt: skip
    taps, shift = layer.joined_taps()
    d_taps, d_shift = launch_conv_silu_grad(
        products,
        taps.contiguous(),
        shift,
        positions(B, T, call.cu_seqlens, dy.device),
        tuple(d.reshape(R, H * S) for d in (dq, dk, dv)),
        d_products[:, :channels],
        largest,
    )
    of_taps, of_shift = d_taps.unsqueeze(1).split(H * S), d_shift.split(H * S)
    later: Any = None  # `_finish_backward` computes these
    d_layer = Weights(
        *[later] * 4, d_up, d_bias, *of_taps, *of_shift, beta_log=d_A, norm=d_norm, out=d_out
    )
    return AdaptiveWeights(d_layer, later, d_dt), d_products


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
