"""Calls of a layer: its output, a training step, and both in float64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.worker.subject.timing import recording
from quasar_kernels.reference import quasar_chunked, quasar_layer, relative_rms

DEVICE = torch.device("cuda")


def output(layer: Any, x: Tensor) -> Tensor:
    """Return the layer's output under autocast, `[B, T, hidden_size]`."""
    with recording(DEVICE):
        return layer(x)[0]  # type: ignore[no-any-return]


def exact(weights: Mapping[str, Tensor], x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Return the layer's output in float64; long chunks need fewer launches."""
    operator = partial(quasar_chunked, chunk=256)
    return quasar_layer(weights, x, num_heads=num_heads, head_dim=head_dim, operator=operator)


def step(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Run one training step with the output gradient `dy`; return the gradients by name."""
    leaves = dict(layer.named_parameters()) | {"x": x}
    for leaf in leaves.values():
        leaf.grad = None
    torch.autograd.backward(output(layer, x), dy)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def gradient_errors(
    layer: Any, x: Tensor, dy: Tensor, num_heads: int, head_dim: int
) -> dict[str, float]:
    """Return the relative RMS error of every gradient of a step against float64 autograd."""
    gradients = step(layer, x, dy)
    wide = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    wide_x = x.detach().double().requires_grad_()
    torch.autograd.backward(exact(wide, wide_x, num_heads, head_dim), dy.double())
    layer.zero_grad()
    return {n: relative_rms(gradients[n], w.grad) for n, w in (wide | {"x": wide_x}).items()}
