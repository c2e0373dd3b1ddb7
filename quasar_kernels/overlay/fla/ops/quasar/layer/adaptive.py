"""The adaptive layer on a GPU as one node of autograd: products, kernels and their gradients.

The stages are the layer's; operator_inputs.py computes what differs between them. One product has
the projections of q, k, v, the gate (`narrow`) and the step sizes.

q, k and v, the operator and its gradients are fp16 in calls with bf16 products, too: q and k have
length 1, and fp16 has eight times the precision at the same speed. Rounded to bf16, they would
cause half of the output's squared error. The gradients are multiplied by a power of two that brings
them into fp16's range (`gradient_scale`), until the convolution's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fla.ops.quasar import switches, torch_private
from fla.ops.quasar.backend import MAX_HEAD_DIM, scan_backward, scan_forward
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.device import on_its_device, once_differentiable
from fla.ops.quasar.layer import paths, wide
from fla.ops.quasar.layer.autograd import SAVED_MIB
from fla.ops.quasar.layer.backward import output_stage_gradients
from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.layer.first_step import (
    OPERATOR_DTYPE,
    AdaptiveWeights,
    prepare,
    product_columns,
)
from fla.ops.quasar.layer.first_tokens import replace_first_tokens
from fla.ops.quasar.layer.gate_and_norm import gate_and_norm
from fla.ops.quasar.layer.gradients import launch_conv_silu_grad
from fla.ops.quasar.layer.kernels import CONV_TAPS, launch_conv_silu
from fla.ops.quasar.layer.library import multiply, positions
from fla.ops.quasar.layer.operator_inputs import (
    Rotation,
    launch_operator_inputs,
    launch_operator_inputs_grad,
)
from fla.ops.quasar.layer.products import over_tokens, product_in, unrounded
from fla.ops.quasar.operator_types import Saved, ScanInputs, StepSizes


class _Results(NamedTuple):
    """What the forward pass saves for the backward pass, for R tokens of H heads of S channels."""

    rows: torch.Tensor  # [R, hidden], x in the products' dtype
    products: Any  # [R, 3 H S], of q, k and v before their convolution; None if not saved
    narrow: torch.Tensor  # [R, S], x times `gate_down`
    logits: torch.Tensor  # [R, H], of the step sizes
    lengths: torch.Tensor  # [R, 2, H] fp32, one over the lengths of q and k
    o: torch.Tensor  # [B, T, H, S], the operator's output
    product: torch.Tensor  # these four are the weights of `_cast_weights`
    gate_up: torch.Tensor
    gate_bias: torch.Tensor
    out: torch.Tensor


def saves_results(call: Call, x: torch.Tensor) -> bool:
    """Return whether the results that a call saves need at most QUASAR_KEEP_MIB."""
    tokens, width = x.numel() // max(1, x.shape[-1]), call.heads * call.head_dim
    token = 2 * (x.shape[-1] + 7 * width + call.head_dim + call.heads) + 12 * call.heads
    return tokens * token <= switches.keep_mib(SAVED_MIB) << 20


def takes(call: Call, x: torch.Tensor, weights: AdaptiveWeights) -> bool:
    """Return whether the kernels support a call with these weights."""
    taps = weights.layer.q_taps
    return (
        x.is_cuda
        and call.dtype.itemsize == 2
        and call.head_dim <= MAX_HEAD_DIM
        and taps is not None
        and taps.shape[-1] == CONV_TAPS
        and call.backend != "torch"
        and all(w is None or w.is_contiguous() for w in (*weights.layer, *weights[1:]))
    )


def _cast_weights(weights: AdaptiveWeights, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the product's weights, padded with zeros to aligned columns, and three others.

    The others are `gate_up`, `gate_bias` and `out`.
    """
    layer, step, _ = weights
    first = (*layer[:4], step)
    sizes = [w.shape[0] for w in first]
    columns = product_columns(weights)
    product = layer.q.new_empty(columns, layer.q.shape[1], dtype=dtype)
    last = layer.gate_up, layer.gate_bias, layer.out
    others = [torch.empty_like(w, dtype=dtype) for w in last]
    targets = [*product.split([*sizes, columns - sum(sizes)])[: len(sizes)], *others]
    torch_private.copy_all(targets, [*first, *last])
    product[sum(sizes) :].zero_()
    return [product, *others]


def _project(
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    rows: torch.Tensor,
    product: torch.Tensor,
    save: bool,
) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
    """Return q, k and v side by side, their products, `narrow`, and the logits.

    Unless `save`, the products may be None.
    """
    B, T, _ = x.shape
    channels, S = 3 * call.heads * call.head_dim, call.head_dim
    bounds, count = call.cu_seqlens, call.sequences(x)
    taps, shift = weights.joined_taps()
    path = paths.choose_products(call, x, weights, wide.FP16_RESULTS)
    if path.program is not None:
        first, fp32_taps = product[: channels + S], taps.float().contiguous()
        try:
            results = wide.project_wide(path.program, rows, first, fp32_taps, save)
        except CudaUnavailableError as error:
            path.failed(error, call)
        else:
            qkv, narrow, products = results
            if count > 1:
                replace_first_tokens(rows, weights, bounds, count, qkv)
            logits = unrounded(rows, product[channels + S :])[:, : call.heads]
            return qkv, products, narrow, logits
    mixed = multiply(rows, product)
    products, narrow, logits = mixed[:, : channels + S + call.heads].split(
        [channels, S, call.heads], dim=-1
    )
    position = positions(B, T, bounds, x.device)
    qkv = launch_conv_silu(products, taps.contiguous(), shift, position, OPERATOR_DTYPE)
    return qkv, products, narrow.to(call.dtype).contiguous(), logits


def _forward(
    call: Call,
    rotation: Rotation | None,
    x: torch.Tensor,
    rows: torch.Tensor,
    weights: AdaptiveWeights,
    *,
    output: bool,
    save: bool,
) -> tuple[torch.Tensor | None, _Results, Saved]:
    """Compute the layer; y is None without `output`. It records nothing for autograd.

    `rows` are x `[R, hidden]` in the products' dtype. Unless `save`, the results may lack products.
    """
    B, T, _ = x.shape
    R, H, S = B * T, call.heads, call.head_dim
    product, *gate_weights, out_weight = _cast_weights(weights, call.dtype)
    qkv, products, narrow, logits = _project(call, x, weights.layer, rows, product, save)
    q, k, v = qkv.view(R, 3, H, S).unbind(1)
    q, k, step, lengths = launch_operator_inputs(
        q, k, logits, weights.layer.beta_log, weights.dt_bias, rotation, overwrite=True
    )
    q, k, v = (t.view(B, T, H, S) for t in (q, k, v))
    steps = StepSizes(step.view(B, T, H), True)
    inputs = ScanInputs(q, k, v, steps, cu_seqlens=call.cu_seqlens, scale=S**-0.5)
    del q, k, v, qkv
    o, _, saved = scan_forward(inputs, backend=call.backend)
    results = _Results(
        *(rows, products, narrow, logits, lengths, o, product, *gate_weights, out_weight)
    )
    if not output:
        return None, results, saved
    normed = gate_and_norm(o.view(R, H, S), narrow, *gate_weights, weights.layer.norm, call.eps)
    return F.linear(normed.view(B, T, H * S), out_weight), results, saved


class AdaptiveFunction(torch.autograd.Function):
    """Saves the intermediate results, or only the input and the weights for long sequences."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, rotation: Rotation | None, keep: bool, x: Any, *weights: Any
    ) -> torch.Tensor:
        """Compute the layer."""
        with torch_private.no_autocast():
            rows = x.flatten(0, 1).to(call.dtype)
            if x.is_cuda:
                prepare(call, rotation, x, _weights(weights))
            y, results, saved = _forward(
                call, rotation, x, rows, _weights(weights), output=True, save=keep
            )
        ctx.call, ctx.rotation, ctx.shape, ctx.dtype = call, rotation, x.shape, x.dtype
        ctx.keep, ctx.segments = keep, saved.segments if keep else None
        ctx.save_for_backward(*weights, *((*results, *saved.tensors()) if keep else (x,)))
        return y  # type: ignore[return-value] # there is an output

    @staticmethod
    @once_differentiable
    @on_its_device
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """Return the gradients of `forward`'s arguments."""
        count, tensors = len(Weights._fields) + 2, ctx.saved_tensors
        weights, kept = _weights(tensors[:count]), tensors[count:]
        with torch_private.no_autocast():
            if ctx.keep:
                size = len(_Results._fields)
                saved = Saved.of(kept[size:], ctx.segments, ctx.call.head_dim**-0.5)
                results = _Results(*kept[:size])
            else:
                (x,) = kept
                rows = x.flatten(0, 1).to(ctx.call.dtype)
                _, results, saved = _forward(
                    ctx.call, ctx.rotation, x, rows, weights, output=False, save=True
                )
            needed = ctx.needs_input_grad[3:]
            settings = ctx.call, ctx.rotation, ctx.shape, ctx.dtype
            gradients = _gradients(*settings, weights, results, saved, dy, needed)
        return None, None, None, *gradients


_apply = torch_private.apply_of(AdaptiveFunction)


def _weights(tensors: Sequence[Any]) -> AdaptiveWeights:
    return AdaptiveWeights(Weights(*tensors[:-2]), *tensors[-2:])


def run_adaptive(
    call: Call, rotation: Rotation | None, x: torch.Tensor, weights: AdaptiveWeights
) -> torch.Tensor:
    """Return the layer's output `[B, T, hidden]`, recorded for autograd if it is on.

    Args:
        call: one that the kernels support (`takes`).
        rotation: of q and k, or None.
        x: `[B, T, hidden]`.
        weights: the layer's.
    """
    if torch.is_grad_enabled():
        tensors = (*weights.layer, *weights[1:])
        apply = AdaptiveFunction.apply if torch_private.transforms_active() else _apply
        return apply(call, rotation, saves_results(call, x), x, *tensors)
    with torch_private.no_autocast():
        rows = x.flatten(0, 1).to(call.dtype)
        y, *_ = _forward(call, rotation, x, rows, weights, output=True, save=False)
    return y  # type: ignore[return-value] # there is an output


def _gradients(
    call: Call,
    rotation: Rotation | None,
    shape: torch.Size,
    x_dtype: torch.dtype,
    weights: AdaptiveWeights,
    results: _Results,
    saved: Saved,
    dy: torch.Tensor,
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Return the gradients of x, of this shape and dtype, and of each weight.

    They are None for those not `needed`.
    """
    B, T, D = shape
    R, H, S, dtype = B * T, call.heads, call.head_dim, call.dtype
    layer, channels = weights.layer, 3 * H * S
    rows, products, narrow, logits, lengths, o, product, *gate_weights, out_weight = results

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
        q,
        k,
        lengths,
        logits,
        layer.beta_log,
        weights.dt_bias,
        rotation,
        dq.view(R, H, S),
        dk.view(R, H, S),
        d_step.view(R, H).contiguous(),
        d_products[:, channels + S : channels + S + H],
        largest,
    )
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
    del dq, dk, dv, products
    dx = product_in(d_products, product, x_dtype).view(shape) if needed[0] else None
    d_weights: Sequence[Any] = [None] * 5
    if any(needed[1:5]) or needed[-2]:
        sizes = [H * S] * 3 + [S, H, product.shape[0] - channels - S - H]
        d_weights = over_tokens(d_products, rows).split(sizes)  # with the padding, for alignment
    gradients = [
        *d_weights[:4],
        d_up,
        d_bias,
        *d_taps.unsqueeze(1).split(H * S),
        *d_shift.split(H * S),
        d_A,
        d_norm,
        d_out,
        d_weights[4],
        d_dt,
    ]
    return [
        dx,
        *(
            d.to(w.dtype) if w is not None and required and d is not None else None
            for d, w, required in zip(gradients, (*layer, *weights[1:]), needed[1:], strict=True)
        ),
    ]


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
