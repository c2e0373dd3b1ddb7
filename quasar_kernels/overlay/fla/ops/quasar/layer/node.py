"""The layer as one node of autograd, whose backward pass is kernels and a few large products.

The node saves the input and the parameters. `keeps` decides whether it also saves intermediate
results. Above a memory limit it does not, and the backward pass recomputes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fla.ops.quasar import switches, torch_private
from fla.ops.quasar.backend import scan_backward
from fla.ops.quasar.device import on_its_device, once_differentiable
from fla.ops.quasar.layer.call import Call, LayerResults, Weights
from fla.ops.quasar.layer.forward import copied_as, layer_forward, run_layer
from fla.ops.quasar.layer.gradients import launch_conv_silu_grad, launch_gated_rmsnorm_grad
from fla.ops.quasar.layer.hopper.wide_projection import recompute_products
from fla.ops.quasar.layer.library import MANY_TOKENS, positions, project
from fla.ops.quasar.layer.products import concatenate_weights, over_tokens, product_in
from fla.ops.quasar.layer.replay import MOST_ELEMENTS, Tensors, replayed
from fla.ops.quasar.scan import Saved, Scan

KEPT_MIB = 3072
"""Default of QUASAR_KEEP_MIB: 380,000 tokens of 512 channels, 190,000 of 1,024."""

MOST_WORK = 1 << 34
"""Largest tokens times channels squared of a replayed backward pass with saved results.

The GPU's time is proportional to it: 65,536 tokens of 512 channels take 2 ms. In longer passes the
GPU does not wait for the host, so a graph would only take memory.
"""


def keeps(call: Call, x: torch.Tensor) -> bool:
    """Return whether a call saves its intermediate results for its backward pass.

    It does if they need at most QUASAR_KEEP_MIB (default 3072): x in the products' dtype, the
    projections before and after the convolution, and the operator's output. All are counted, though
    Hopper's stages save fewer. Short calls that may be replayed as CUDA graphs (replay.py) save
    nothing, because the next replay overwrites all intermediate results. The decision depends on
    the call's settings and shapes only, so both passes of activation checkpointing save the same.

    Raises:
        ValueError: QUASAR_KEEP_MIB is not a whole number.
    """
    if _is_short(call, x):
        return False
    limit = switches.keep_mib(KEPT_MIB)
    tokens, width = x.numel() // x.shape[-1], call.heads * call.head_dim
    size = call.dtype.itemsize
    product = 4 if tokens < MANY_TOKENS else size  # project() keeps few tokens in fp32
    token = size * (x.shape[-1] + 4 * width + call.head_dim) + product * (3 * width + call.head_dim)
    return tokens * token <= limit << 20


def _is_short(call: Call, x: torch.Tensor) -> bool:
    return call.cu_seqlens is None and call.dtype.itemsize == 2 and x.numel() <= MOST_ELEMENTS


class LayerFunction(torch.autograd.Function):
    """Saves the input and the weights, and intermediate results if `keeps` allows it."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, owner: object, x: torch.Tensor, *weights: Any
    ) -> torch.Tensor:
        """Compute the layer, as `run_layer` does."""
        # a weak reference, because a layer that stores its output would otherwise never be freed
        ctx.call, ctx.segments, ctx.owner = call, None, weakref.ref(owner)
        if not keeps(call, x):
            ctx.save_for_backward(x, *weights)
            return run_layer(call, owner, x, Weights(*weights))
        y, *kept, operator = layer_forward(call, x, Weights(*weights), keep=True)
        ctx.segments = operator.saved.segments
        ctx.save_for_backward(x, *weights, *kept, operator.o, *operator.saved.tensors())
        return y

    @staticmethod
    @once_differentiable
    @on_its_device
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """Return the gradients of `forward`'s arguments, by a CUDA graph if possible."""
        call, segments, needed = ctx.call, ctx.segments, tuple(ctx.needs_input_grad[2:])
        x, *tensors = ctx.saved_tensors
        count = len(Weights._fields)

        def compute(x: torch.Tensor, dy: torch.Tensor, *tensors: Any) -> tuple[Tensors, Tensors]:
            weights, kept = Weights(*tensors[:count]), tensors[count:]
            results = None
            if kept:
                operator = Scan(kept[3], None, Saved.of(kept[4:], segments))
                results = LayerResults(None, *kept[:3], operator)
            return layer_gradients(call, x, weights, results, dy, needed)

        def input_gradient(d_products: torch.Tensor, projections: torch.Tensor) -> torch.Tensor:
            return product_in(d_products, projections, x.dtype).view(x.shape)

        inputs: tuple[torch.Tensor, ...] = (x, dy)
        most = MOST_ELEMENTS
        if segments is not None:
            # saved results may be large, so the graph reads them without a copy
            inputs, tensors, most = (), (x, dy, *tensors), MOST_WORK // x.shape[-1]
        with torch.autocast(dy.device.type, enabled=False):
            d_weights, dx = replayed(
                ctx.owner() if call.cu_seqlens is None else None,
                compute,
                inputs,
                tensors,
                call.dtype,
                ("backward", call, segments, needed, x.dtype),
                most=most,
                finish=input_gradient if needed[0] else None,
                copied=lambda tensor: copied_as(call, tensor, Weights(*tensors[:count])),
            )
        return None, None, dx, *d_weights


_apply = torch_private.apply_of(LayerFunction)


def record_layer(call: Call, owner: object, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Return `run_layer(call, owner, x, weights)`, recorded for autograd."""
    apply = LayerFunction.apply if torch_private.transforms_active() else _apply
    return apply(call, owner, x, *weights)


def layer_gradients(
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    results: LayerResults | None,
    dy: torch.Tensor,
    needed: Sequence[bool],
    *,
    across: Any = None,
    first: list[Any] | None = None,
) -> tuple[Tensors, Tensors]:
    """Return the weights' gradients, None for those not `needed`, and two factors of x's gradient.

    The factors are the gradient of the products and the weights of the products. Tensors are freed
    after their last use, because for a million tokens each takes gigabytes.

    Args:
        results: the intermediate results of the forward pass; None recomputes them.
        needed: whether the gradients of x and of each weight are needed.
        across: as in `layer_forward`.
        first: receives the results of `across.first_gradients`.
    """
    B, T, D = x.shape
    R, H, S, dtype = B * T, call.heads, call.head_dim, call.dtype
    channels = 3 * H * S  # of q, k and v
    projections, *gate_weights, out_weight = concatenate_weights(weights, dtype)
    if results is None:
        results = layer_forward(call, x, weights, keep=True, output=False, across=across)
    _, rows, products, narrow, operator = results
    del results
    do, d_gate, output_stage = _output_stage_gradients(
        call,
        operator.o.view(R, H, S),
        narrow,
        gate_weights,
        weights.norm,
        out_weight,
        dy.reshape(R, D).to(dtype),
    )
    d_narrow = torch.mm(d_gate, gate_weights[0])
    saved = operator.saved
    del d_gate, narrow, operator
    do = do.view(B, T, H, S)
    if across is None:
        *d_qkv, d_beta, _, _ = scan_backward(saved, do, backend=call.backend)
    else:
        *d_qkv, d_beta, _, _ = across.backward(saved, do)
    del do, saved
    if across is not None and first is not None:
        first += across.first_gradients(call, x, weights, d_qkv)
    rows = x.reshape(R, D).to(dtype) if rows is None else rows
    d_products = torch.empty(R, channels + S, dtype=dtype, device=x.device)
    d_products[:, channels:] = d_narrow
    if products is None and _is_short(call, x):
        # never saved, so they may be rounded to 16 bits; of the size of q, k and v, now free
        products = F.linear(rows, projections[:channels])
    elif products is None:  # bit for bit those that the forward pass can save
        products = recompute_products(call, x, weights, rows, projections)
        products = project(rows, projections) if products is None else products
    d_taps, d_shift = launch_conv_silu_grad(
        products[:, :channels],
        *weights.joined_taps(),
        positions(B, T, call.cu_seqlens, x.device),
        tuple(d.view(R, H * S) for d in d_qkv),
        d_products[:, :channels],
    )
    del products, d_qkv
    d_projections = [None] * 4
    if any(needed[1:5]):
        d_projections = over_tokens(d_products, rows).split([H * S] * 3 + [S])
    d_wide, d_bias, d_norm, d_out = output_stage
    d_beta = d_beta * torch.sigmoid(weights.beta_log.float())
    gradients = [
        *d_projections,
        d_wide,
        d_bias,
        *d_taps.unsqueeze(1).split(H * S),
        *d_shift.split(H * S),
        d_beta,
        d_norm,
        d_out,
    ]
    d_weights = [
        d.to(w.dtype) if w is not None and required else None
        for d, w, required in zip(gradients, weights, needed[1:], strict=True)
    ]
    return d_weights, (d_products, projections)


def _output_stage_gradients(
    call: Call,
    o: torch.Tensor,
    narrow: torch.Tensor,
    gate_weights: Sequence[torch.Tensor],
    norm_weight: torch.Tensor,
    out_weight: torch.Tensor,
    dy: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the gradients of o `[R, H, S]`, of the gate `[R, H S]`, and of the stage's weights.

    These weights are the gate's wide half and its bias, the norm's weight and the output's weight;
    their gradients are fp32.
    """
    gate = F.linear(narrow, *gate_weights).view(o.shape)
    d_normed = torch.mm(dy, out_weight).view(o.shape)
    normed = torch.empty_like(o)
    do, d_gate, d_norm, d_bias = launch_gated_rmsnorm_grad(
        o, gate, norm_weight, d_normed, call.eps, normed, overwrite=True
    )
    d_gate = d_gate.flatten(1)
    d_wide, d_out = over_tokens(d_gate, narrow), over_tokens(dy, normed.flatten(1))
    return do, d_gate, (d_wide, d_bias.flatten(), d_norm, d_out)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
