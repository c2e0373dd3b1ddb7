"""The layer's backward pass: kernels and a few large products, or torch's autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fla.ops.quasar import torch_private
from fla.ops.quasar.backend import scan_backward
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.layer import library, paths, wide
from fla.ops.quasar.layer.call import Call, Results, Weights
from fla.ops.quasar.layer.forward import input_dtype, is_short, layer_forward
from fla.ops.quasar.layer.gradients import launch_conv_silu_grad, launch_gated_rmsnorm_grad
from fla.ops.quasar.layer.graphs import Inputs, Operation, Tensors
from fla.ops.quasar.layer.products import concatenate_weights, over_tokens, product_in

if TYPE_CHECKING:
    from fla.ops.quasar.layer.rank_slice import RankSlice  # imports torch.distributed

_COUNT = len(Weights._fields)


def layer_gradients(
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    results: Results | None,
    dy: torch.Tensor,
    needed: Sequence[bool],
    rank: RankSlice | None = None,
) -> tuple[list[torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]:
    """Return the weights' gradients, None for those not `needed`, and two factors of x's gradient.

    The factors are the products' gradient and the products' weights. Tensors are freed after their
    last use, because each takes gigabytes for a million tokens.

    Args:
        results: the intermediate results of the forward pass; None recomputes them.
        needed: whether the gradients of x and of each weight are needed.
        rank: as in `layer_forward`. The caller must add the gradients of later ranks' halos to x's
            by `exchange_halo_gradients`.
    """
    B, T, D = x.shape
    R, H, S, dtype = B * T, call.heads, call.head_dim, call.dtype
    channels = 3 * H * S  # of q, k and v
    projections, *gate_weights, out_weight = concatenate_weights(weights, dtype)
    if results is None:
        results = layer_forward(call, x, weights, save=True, output=False, rank=rank)
    _, rows, products, narrow, operator = results
    del results
    do, d_gate, (d_up, d_bias, d_norm, d_out), _ = output_stage_gradients(
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
    if rank is None:
        *d_qkv, d_beta, _, _ = scan_backward(saved, do, backend=call.backend)
    else:
        *d_qkv, d_beta, _, _ = rank.backward(saved, do)
        rank.take_first_gradients(x, projections[:channels], weights, d_qkv)
    del do, saved
    rows = x.reshape(R, D).to(dtype) if rows is None else rows
    if products is None and is_short(call, x):
        # never saved, so 16 bits suffice; they fit into the memory of q, k and v, which is now free
        products = F.linear(rows, projections[:channels])
    elif products is None:  # bit for bit those that wide.py or library.py saves
        products = _compute_products(call, x, weights, rows, projections)
    # allocated after the products: their kernel needs as much memory for results that are not used
    d_products = torch.empty(R, channels + S, dtype=dtype, device=x.device)
    d_products[:, channels:] = d_narrow
    d_taps, d_shift = launch_conv_silu_grad(
        products[:, :channels],
        *weights.joined_taps(),
        library.positions(B, T, call.cu_seqlens, x.device),
        tuple([d.view(R, H * S) for d in d_qkv]),
        d_products[:, :channels],
    )
    del products, d_qkv
    if rank is not None:
        rank.add_first_gradients(d_products, d_taps, d_shift)
    d_projections = [None] * 4
    if any(needed[1:5]):
        d_all = over_tokens(d_products, rows)
        if rank is not None:
            rank.add_halo_projections(d_all)
        d_projections = d_all.split([H * S] * 3 + [S])
    d_beta = d_beta * torch.sigmoid(weights.beta_log.float())
    of_taps, of_shift = d_taps.unsqueeze(1).split(H * S), d_shift.split(H * S)
    gradients = [*d_projections, d_up, d_bias, *of_taps, *of_shift, d_beta, d_norm, d_out]
    d_weights = [
        d.to(w.dtype) if w is not None and required else None
        for d, w, required in zip(gradients, weights, needed[1:], strict=True)
    ]
    return d_weights, (d_products, projections)


def _compute_products(
    call: Call, x: torch.Tensor, weights: Weights, rows: torch.Tensor, projections: torch.Tensor
) -> torch.Tensor:
    """Return the products of q, k and v, bit for bit those that wide.py or library.py saves.

    Args:
        call, x, weights: the layer's call.
        rows: x in the products' dtype, `[R, hidden]`.
        projections: the first result of `concatenate_weights`.
    """
    path = paths.choose_products(call, x, weights)
    if path.program is not None:
        taps = weights.joined_taps()[0].float().contiguous()
        try:
            return wide.project_wide(path.program, rows, projections, taps, keep=True)[2]
        except CudaUnavailableError as error:
            path.failed(error, call)
    return library.multiply(rows, projections)


def output_stage_gradients(
    call: Call,
    o: torch.Tensor,
    narrow: torch.Tensor,
    gate_weights: Sequence[torch.Tensor],
    norm_weight: torch.Tensor,
    out_weight: torch.Tensor,
    dy: torch.Tensor,
    scaled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Return the gradients of o `[R, H, S]`, of the gate `[R, H S]`, and of the stage's weights.

    These weights are `gate_up`, `gate_bias`, `norm` and `out`; their gradients are fp32. The last
    result is None. If `scaled`, it is the number `largest`, and the gradient of o is in fp16,
    multiplied by `gradient_scale(largest)`.
    """
    gate = F.linear(narrow, *gate_weights).view(o.shape)
    d_normed = torch.mm(dy, out_weight).view(o.shape)
    normed, largest = torch.empty_like(d_normed), None
    if scaled:  # without tokens there is no largest
        largest = torch.linalg.vector_norm(d_normed, torch.inf) if len(o) else dy.new_zeros(())
    do, d_gate, d_norm, d_bias = launch_gated_rmsnorm_grad(
        o, gate, norm_weight, d_normed, call.eps, normed, overwrite=True, largest=largest
    )
    d_gate = d_gate.flatten(1)
    d_up, d_out = over_tokens(d_gate, narrow), over_tokens(dy, normed.flatten(1))
    return do, d_gate, (d_up, d_bias.flatten(), d_norm, d_out), largest


def gradients_by_torch(
    call: Call, x: torch.Tensor, weights: Weights, dy: torch.Tensor, needed: Sequence[bool]
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Return the gradients of x and of the weights: autograd records the forward pass again."""
    leaves = [
        None if t is None else t.detach().requires_grad_(required)
        for t, required in zip((x, *weights), needed, strict=True)
    ]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    with torch.enable_grad(), torch_private.no_autocast():
        y, _ = library.layer_with_states(call, leaves[0], Weights(*leaves[1:]))
        # without tokens, the output may not depend on all inputs
        gradients = iter(torch.autograd.grad(y, wanted, dy, materialize_grads=True))
    dx, *d_weights = (
        next(gradients) if t is not None and t.requires_grad else None for t in leaves
    )
    return dx, d_weights


def _compute_backward(settings: Any, inputs: Inputs, tensors: Tensors) -> tuple[Tensors, Tensors]:
    call, segments, needed, _ = settings
    x, dy, *others = list[Any]((*inputs, *tensors))
    weights, results = Weights(*others[:_COUNT]), Results.of(others[_COUNT:], segments)
    return layer_gradients(call, x, weights, results, dy, needed)


def _finish_backward(settings: Any, inputs: Inputs, tensors: Tensors, rest: Tensors) -> Any:
    """Return x's gradient, or None if it is not needed."""
    x, needed = (inputs or tensors)[0], settings[2]
    if not needed[0]:
        return None
    d_products, projections = rest
    return product_in(d_products, projections, x.dtype).view(x.shape)


def _input_dtypes(settings: Any, inputs: Inputs, tensors: Tensors) -> list[torch.dtype]:
    if not inputs:
        return []
    call, weights = settings[0], Weights(*tensors[:_COUNT])
    return [input_dtype(call, inputs[0], weights), call.dtype]


BACKWARD = Operation(_compute_backward, _finish_backward, _input_dtypes)
"""`layer_gradients`, and after it, outside of the graph, the product of its two factors: x's
gradient. The settings are (call, segments of the saved results or None, which gradients are needed,
x's dtype).

Inputs and tensors together are x, dy, the weights and the saved results. If nothing was saved, x
and dy are inputs. Otherwise all are tensors, which a graph reads without a copy: saved results may
be large."""


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
