"""The adaptive layer's forward pass on a GPU: products and kernels.

The stages are those of the first layer (forward.py); operator_inputs.py computes what differs. One
product computes the projections to q, k, v, the gate (`narrow`) and the step sizes.

q, k and v and the operator are fp16 in calls with bf16 products, too: q and k have length 1, and
fp16 has eight times the precision at the same speed. Rounded to bf16, they would cause half of the
output's squared error. adaptive_training.py has the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fla.ops.quasar import torch_private
from fla.ops.quasar.backend import MAX_HEAD_DIM, cuda_program, scan_forward
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.layer import paths, wide
from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.layer.first_step import OPERATOR_DTYPE, AdaptiveWeights, product_columns
from fla.ops.quasar.layer.first_tokens import replace_first_tokens
from fla.ops.quasar.layer.gate_and_norm import gate_and_norm
from fla.ops.quasar.layer.graphs import Inputs, Operation, Tensors, launch_or_replay
from fla.ops.quasar.layer.kernels import CONV_TAPS, launch_conv_silu
from fla.ops.quasar.layer.library import multiply, positions
from fla.ops.quasar.layer.operator_inputs import Rotation, launch_operator_inputs
from fla.ops.quasar.layer.products import unrounded
from fla.ops.quasar.operator_types import Saved, ScanInputs, StepSizes

MAX_ELEMENTS = 1 << 25
"""Largest input of a replayed call. 16,384 tokens of 1,536 channels take 0.9 ms on an H200, and
their launches almost as long."""


class AdaptiveResults(NamedTuple):
    """What the forward pass saves for the backward pass, for R tokens of H heads of S channels."""

    rows: torch.Tensor  # [R, hidden], x in the products' dtype
    products: Any  # [R, 3 H S], of q, k and v before their convolution; None if not saved
    qkv: torch.Tensor  # [R, 3 H S], the operator's q, k and v
    narrow: torch.Tensor  # [R, S], x times `gate_down`
    logits: torch.Tensor  # [R, at least H], of the step sizes
    lengths: torch.Tensor  # [R, 2, H] fp32, one over the lengths of q and k
    step: torch.Tensor  # [R, H] fp32
    o: torch.Tensor  # [R, H S], the operator's output
    product: torch.Tensor  # these four are the weights of `cast_weights`
    gate_up: torch.Tensor
    gate_bias: torch.Tensor
    out: torch.Tensor

    def scan_inputs(self, call: Call, shape: Sequence[int]) -> ScanInputs:
        """Return the operator's inputs for x `[B, T, hidden]` of this shape."""
        B, T, _ = shape
        q, k, v = self.qkv.view(B, T, 3, call.heads, call.head_dim).unbind(2)
        steps = StepSizes(self.step.view(B, T, call.heads), True)
        scale = call.head_dim**-0.5
        return ScanInputs(q, k, v, steps, cu_seqlens=call.cu_seqlens, scale=scale)


def supports_kernels(call: Call, x: torch.Tensor, weights: AdaptiveWeights) -> bool:
    """Return whether the kernels support a call with these weights."""
    taps = weights.layer.q_taps
    return (
        x.is_cuda
        and call.dtype.itemsize == 2
        and call.head_dim <= MAX_HEAD_DIM
        and taps is not None
        and taps.shape[-1] == CONV_TAPS
        and call.backend != "torch"
        and all(w is None or w.is_contiguous() for w in weights.tensors())
    )


def cast_weights(
    weights: AdaptiveWeights, dtype: torch.dtype, into: AdaptiveResults | None = None
) -> list[torch.Tensor]:
    """Return the product's weights, padded with zeros to aligned columns, and three others.

    The others are `gate_up`, `gate_bias` and `out`.
    """
    layer, first = weights.layer, weights.first()
    sizes = [w.shape[0] for w in first]
    columns = product_columns(weights)
    last = layer.gate_up, layer.gate_bias, layer.out
    if into is None:
        product = layer.q.new_empty(columns, layer.q.shape[1], dtype=dtype)
        others = [torch.empty_like(w, dtype=dtype) for w in last]
    else:
        product, *others = into[-4:]
    targets = [*product.split([*sizes, columns - sum(sizes)])[: len(sizes)], *others]
    torch_private.copy_all(targets, [*first, *last])
    product[sum(sizes) :].zero_()
    return [product, *others]


def _project(
    call: Call,
    shape: Sequence[int],
    weights: Weights,
    rows: torch.Tensor,
    product: torch.Tensor,
    save: bool,
    into: AdaptiveResults | None,
) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the `products`, `qkv`, `narrow` and `logits` of `AdaptiveResults`.

    Unless `save`, the products may be None.
    """
    B, T, _ = shape
    channels, S = 3 * call.heads * call.head_dim, call.head_dim
    x, bounds = rows.view(*shape), call.cu_seqlens
    taps, shift = weights.joined_taps()
    path = paths.choose_products(call, x, weights, wide.FP16_RESULTS)
    if path.program is not None:
        first, fp32_taps = product[: channels + S], taps.float().contiguous()
        targets = None if into is None else (into.qkv, into.narrow, into.products)
        try:
            qkv, narrow, products = wide.project_wide(
                path.program, rows, first, fp32_taps, save, targets
            )
        except CudaUnavailableError as error:
            path.failed(error, call)
            if into is not None:
                raise
        else:
            if (count := call.sequences(x)) > 1:
                replace_first_tokens(rows, weights, bounds, count, qkv)
            logits = unrounded(rows, product[channels + S :])
            return products, qkv, narrow, logits if into is None else into.logits.copy_(logits)
    mixed = multiply(rows, product)
    products, narrow, logits = mixed.tensor_split([channels, channels + S], dim=-1)
    position = positions(B, T, bounds, rows.device)
    qkv = launch_conv_silu(products, taps.contiguous(), shift, position, OPERATOR_DTYPE)
    return products, qkv, narrow.to(call.dtype).contiguous(), logits


def adaptive_forward(
    call: Call,
    rotation: Rotation | None,
    shape: Sequence[int],
    rows: torch.Tensor,
    weights: AdaptiveWeights,
    *,
    save: bool = False,
    into: AdaptiveResults | None = None,
    maps: Any = (None, None),
) -> tuple[AdaptiveResults, Saved]:
    """Compute everything before the output stage; it records nothing for autograd.

    Args:
        call, rotation, weights: as in `run_adaptive`.
        shape: of x.
        rows: x in the products' dtype, `[R, hidden]`, contiguous.
        save: whether to return products; otherwise they may be None.
        into: tensors for the results, if CUDA programs compute the projection and the operator;
            None for new ones.
        maps: with `into`, tensors for G and the states of `Saved`, None if no sequence is cut.

    Raises:
        CudaUnavailableError: a launch failed, and QUASAR_BACKEND is `cuda` or `into` is given.
    """
    R, H, S = rows.shape[0], call.heads, call.head_dim
    product, *last_weights = cast_weights(weights, call.dtype, into)
    projected = _project(call, shape, weights.layer, rows, product, save, into)
    products, qkv, narrow, logits = projected
    q, k, _ = qkv.view(R, 3, H, S).unbind(1)
    _, _, step, lengths = launch_operator_inputs(
        *(q, k, logits[:, :H], weights.layer.beta_log, weights.dt_bias, rotation),
        overwrite=True,
        into=None if into is None else (into.step, into.lengths),
    )
    o: Any = None if into is None else into.o
    results = AdaptiveResults(
        *(rows, products, qkv, narrow, logits, lengths, step, o, product, *last_weights)
    )
    inputs = results.scan_inputs(call, shape)
    if into is not None:
        program = cuda_program(inputs, call.backend)
        o = o.view(inputs.v.shape)
        try:
            return results, cuda_scan.forward(inputs, program=program, into=(o, *maps)).saved
        except CudaUnavailableError as error:
            if program is not None:
                cuda_scan.PROGRAM.failed(call.backend, program.variant, error)
            raise
    o, _, saved = scan_forward(inputs, backend=call.backend)
    return results._replace(o=o.view(R, H * S)), saved


def gated_output(
    call: Call, shape: Sequence[int], results: AdaptiveResults, norm: torch.Tensor
) -> torch.Tensor:
    """Return the operator's output after the norm (with weight `norm`) and gate, `[B, T, H S]`."""
    o = results.o.view(-1, call.heads, call.head_dim)
    gate = results.narrow, results.gate_up, results.gate_bias
    return gate_and_norm(o, *gate, norm, call.eps).view(*shape[:2], -1)


def rows_of(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Return x `[R, hidden]` in the products' dtype, contiguous."""
    return x.flatten(0, 1).to(call.dtype).contiguous()


def _compute_forward(call: Call, inputs: Inputs, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Compute the layer, except the last product."""
    x, *tables = inputs
    weights, rotation = AdaptiveWeights.of(tensors), Rotation(*tables) if tables else None
    results, _ = adaptive_forward(call, rotation, x.shape, rows_of(call, x), weights)
    return [], (gated_output(call, x.shape, results, weights.layer.norm), results.out)


def _finish_forward(call: Call, inputs: Inputs, tensors: Tensors, rest: Tensors) -> torch.Tensor:
    """Return the layer's output; as a result of the graph, it would have to be copied."""
    return F.linear(*rest)


def input_dtypes(call: Call, inputs: Inputs, tensors: Tensors) -> list[torch.dtype]:
    """Return the dtypes of a graph's copies of x and of the other inputs."""
    return [call.dtype, *(x.dtype for x in inputs[1:])]


FORWARD = Operation(_compute_forward, _finish_forward, input_dtypes)
"""The layer's output. The inputs are x and the tables of the rotation, if there is one."""


def run_adaptive(
    call: Call, owner: object, rotation: Rotation | None, x: torch.Tensor, weights: AdaptiveWeights
) -> torch.Tensor:
    """Return the layer's output `[B, T, hidden]`; it records nothing for autograd.

    Args:
        call: one that the kernels support (`supports_kernels`).
        owner: the graphs are dropped together with this object.
        rotation: of q and k, or None.
        x: `[B, T, hidden]`.
        weights: the layer's.
    """
    # the host cuts packed sequences into segments, which a graph cannot replay
    owner = owner if call.cu_seqlens is None else None
    inputs = (x, *(rotation or ()))
    with torch_private.no_autocast():
        y: torch.Tensor = launch_or_replay(
            owner, FORWARD, call, inputs, weights.tensors(), call.dtype, MAX_ELEMENTS
        )[1]
    return y


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
