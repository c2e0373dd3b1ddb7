"""The adaptive layer's weights, and the start of its kernels' compilation, all at the same time.

Triton compiles a kernel at its first launch, one after another in a training step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from fla.ops.quasar.backend import prepare_training
from fla.ops.quasar.cuda.scan.scan_forward import READ_STEP
from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.layer.gradients import launch_conv_silu_grad, launch_gated_rmsnorm_grad
from fla.ops.quasar.layer.operator_inputs import (
    Rotation,
    launch_operator_inputs,
    launch_operator_inputs_grad,
)

OPERATOR_DTYPE = torch.float16
"""The dtype of the operator's inputs, output and gradients."""
_ALIGNED = 16
"""The product's columns are a multiple of this, so that the library can use its fast kernels."""
_TOKENS = 16
_prepared: set[tuple[Any, ...]] = set()


class AdaptiveWeights(NamedTuple):
    """The layer's weights, in the order in which they pass through autograd."""

    layer: Weights  # `beta_log` is A_log
    step: torch.Tensor  # [H, hidden], of the step sizes
    dt_bias: torch.Tensor  # [H S]


def product_columns(weights: AdaptiveWeights) -> int:
    """Return the columns of the product for q, k, v, the gate's narrow half and the step sizes."""
    columns = sum(w.shape[0] for w in (*weights.layer[:4], weights.step))
    return columns + -columns % _ALIGNED


def prepare(
    call: Call, rotation: Rotation | None, x: torch.Tensor, weights: AdaptiveWeights
) -> None:
    """Start to compile the kernels of a first training step in the background.

    These are all of the forward pass but the projection and the gated norm, which compile at their
    calls in the meantime, and all of the backward pass.
    """
    table = None if rotation is None else (rotation.cos.dtype, rotation.cos.shape[-1])
    packed = call.cu_seqlens is not None
    key = (x.device, call.heads, call.head_dim, call.dtype, table, packed)
    if key not in _prepared:
        _prepared.add(key)
        prepare_training(x.new_empty(0, dtype=OPERATOR_DTYPE), *key[1:3], READ_STEP)
        _in_background(x.device, _launches(call, rotation, x, weights))


def _launches(
    call: Call, rotation: Rotation | None, x: torch.Tensor, weights: AdaptiveWeights
) -> list[Callable[[], object]]:
    """Return launches of the Triton kernels for a few tokens."""
    R, H, S, layer = _TOKENS, call.heads, call.head_dim, weights.layer
    channels, columns = 3 * H * S, product_columns(weights)
    new = partial(torch.zeros, device=x.device)
    qkv, heads = (new(R, n, S, dtype=OPERATOR_DTYPE) for n in (3 * H, H))
    q, k, _ = qkv.view(R, 3, H, S).unbind(1)
    gate, d_normed, normed = new(3, R, H, S, dtype=call.dtype)
    d_products, largest = new(R, columns, dtype=call.dtype), new((), dtype=call.dtype)
    d_logits = d_products[:, channels + S : channels + S + H]
    logits = new(R, columns - channels - S)[:, :H]
    inputs = logits, layer.beta_log.detach(), weights.dt_bias.detach(), rotation
    taps, shift = (None if t is None else t.detach() for t in layer.joined_taps())
    position = None if call.cu_seqlens is None else new(R, dtype=torch.int32)
    results, scaled = {"overwrite": True}, {"overwrite": True, "largest": largest}
    gradients = heads, heads, new(R, H), d_logits, largest
    norm = heads, gate, layer.norm.detach(), d_normed, call.eps, normed
    convolved = (heads.flatten(1),) * 3, d_products[:, :channels], largest
    return [
        partial(launch_operator_inputs, q, k, *inputs, **results),
        partial(launch_gated_rmsnorm_grad, *norm, **scaled),
        partial(launch_operator_inputs_grad, q, k, new(R, 2, H), *inputs, *gradients),
        partial(launch_conv_silu_grad, qkv.flatten(1), taps, shift, position, *convolved),
    ]


def _in_background(device: torch.device, launches: Iterable[Callable[[], object]]) -> None:
    """Run functions that launch kernels, each in its own thread.

    A later launch of a kernel waits for its compilation, and meets the same errors. A process that
    ends waits for the threads, because Triton's compiler must not be interrupted.
    """

    def run(launch: Callable[[], object]) -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device):
            launch()

    for launch in launches:
        threading.Thread(target=run, args=(launch,)).start()


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
