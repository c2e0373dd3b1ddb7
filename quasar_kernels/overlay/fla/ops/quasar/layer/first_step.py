"""The adaptive layer's weights, and a function that compiles all of its kernels at the same time.

Without it, Triton compiles each kernel at its first launch, and a training step waits for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fla.ops.quasar.backend import prepare_training
from fla.ops.quasar.cuda.scan.scan_forward import READ_STEP
from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.layer.gate_and_norm import gate_and_norm
from fla.ops.quasar.layer.gradients import launch_conv_silu_grad, launch_gated_rmsnorm_grad
from fla.ops.quasar.layer.operator_inputs import (
    Rotation,
    launch_operator_inputs,
    launch_operator_inputs_grad,
)
from fla.ops.quasar.triton_kernels.launch import compile_ahead

OPERATOR_DTYPE = torch.float16
"""The dtype of the operator's inputs, output and gradients."""
_ALIGNED = 16
"""The first product's columns are padded to a multiple of this, for cuBLAS's fast kernels."""


class AdaptiveWeights(NamedTuple):
    """The layer's weights, in the order in which they pass through autograd."""

    layer: Weights  # its `beta_log` holds the parameter A_log
    step: torch.Tensor  # [H, hidden], the projection to the step sizes
    dt_bias: torch.Tensor  # [H S]

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return all weights."""
        return *self.layer, self.step, self.dt_bias

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> AdaptiveWeights:
        """Return the weights from the tuple that their `tensors` returned."""
        return cls(Weights(*tensors[:-2]), *tensors[-2:])

    def first(self) -> tuple[torch.Tensor, ...]:
        """Return the weights of the first product: of q, k, v, `narrow` and the step sizes."""
        return *self.layer[:4], self.step


def product_columns(weights: AdaptiveWeights) -> int:
    """Return the padded number of columns of the product for q, k, v, `narrow` and step sizes."""
    columns = sum(w.shape[0] for w in weights.first())
    return columns + -columns % _ALIGNED


def prepare(
    call: Call, rotation: Rotation | None, x: torch.Tensor, weights: AdaptiveWeights
) -> None:
    """Start to compile the kernels of a first training step in the background.

    These are the operator's CUDA kernels and the layer's Triton kernels. The projection's CUDA
    kernel is not among them: its own first call compiles it in the meantime.
    """
    R = x.shape[0] * x.shape[1]
    table = None if rotation is None else (rotation.cos.dtype, rotation.cos.shape[-1])
    key = (*call[:4], call.cu_seqlens is None, table, R.bit_length())
    compile_ahead(key, _launches, call, rotation, R, weights)
    prepare_training(x.new_empty(0, dtype=OPERATOR_DTYPE), *call[:2], READ_STEP)


def _launches(call: Call, rotation: Rotation | None, R: int, weights: AdaptiveWeights) -> None:
    """Launch the Triton kernels of a step of R tokens, for `compile_ahead`."""
    H, S, layer = call.heads, call.head_dim, weights.layer
    channels, columns = 3 * H * S, product_columns(weights)
    new = partial(torch.empty, device=weights.step.device)
    half, wide = partial(new, dtype=OPERATOR_DTYPE), partial(new, dtype=call.dtype)
    qkv, heads, d_products, largest = half(R, 3, H, S), half(R, H, S), wide(R, columns), wide(())
    inputs = new(R, columns - channels - S)[:, :H], layer.beta_log, weights.dt_bias, rotation
    q, k, _ = qkv.unbind(1)
    launch_operator_inputs(q, k, *inputs, overwrite=True)
    gate_weights = wide(H * S, S), wide(H * S)
    gate_and_norm(heads, wide(R, S), *gate_weights, layer.norm, call.eps)
    gate, d_normed, normed = wide(3, R, H, S)
    norm = heads, gate, layer.norm, d_normed, call.eps, normed
    launch_gated_rmsnorm_grad(*norm, overwrite=True, largest=largest)
    d_logits = d_products[:, channels + S : channels + S + H]
    gradients = heads, heads, new(R, H), d_logits, largest
    launch_operator_inputs_grad(q, k, new(R, 2, H), *inputs, *gradients)
    taps, shift = layer.joined_taps()
    position = None if call.cu_seqlens is None else new(R, dtype=torch.int32)
    dys, dx = (heads.flatten(1),) * 3, d_products[:, :channels]
    launch_conv_silu_grad(qkv.flatten(1), taps, shift, position, dys, dx, largest)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
