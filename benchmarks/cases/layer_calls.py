"""Calls of a layer: its inputs, its output, a training step, and their errors against float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quasar_kernels.reference import quasar_chunked, quasar_layer, relative_rms

DEVICE = torch.device("cuda")

Exact = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Returns the layer's output in float64 for weights by name and an input."""


def shape_label(hidden_size: int, heads: int, head_dim: int, batch: int, tokens: int) -> str:
    """Return a label with the sizes of a layer and of its input."""
    return f"{hidden_size:,} wide, {heads} x {head_dim}, {batch} x {tokens:,}"


def inputs(batch: int, tokens: int, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Return an input that needs a gradient, and a bf16 gradient of the output.

    Both are `[B, T, hidden_size]`.
    """
    x, dy = (torch.randn(batch, tokens, hidden_size, device=DEVICE) for _ in range(2))
    return x.requires_grad_(), dy.bfloat16()


def output(layer: Any, x: Tensor, *, autocast: bool = True, **options: Any) -> Tensor:
    """Return the layer's output `[B, T, hidden_size]`; `autocast` enables bf16 autocast."""
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        return layer(x, **options)[0]  # type: ignore[no-any-return]


def step(layer: Any, x: Tensor, dy: Tensor, **options: Any) -> dict[str, Tensor]:
    """Run one training step with the output gradient `dy`; return the gradients by name."""
    leaves = dict(layer.named_parameters()) | {"x": x}
    for leaf in leaves.values():
        leaf.grad = None
    y = output(layer, x, **options)
    torch.autograd.backward(y, dy.to(y.dtype))
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def exact(weights: Mapping[str, Tensor], x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Return QuasarAttention's output in float64; long chunks need fewer launches."""
    operator = partial(quasar_chunked, chunk=256)
    return quasar_layer(weights, x, num_heads=num_heads, head_dim=head_dim, operator=operator)


def gradient_errors(
    layer: Any, x: Tensor, dy: Tensor, exact: Exact, **options: Any
) -> dict[str, float]:
    """Return the relative RMS error of every gradient of a step against float64 autograd."""
    gradients = step(layer, x, dy, **options)
    leaves = dict(layer.named_parameters()) | {"x": x}
    wide = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    torch.autograd.backward(exact(wide, wide["x"]), dy.double())
    layer.zero_grad()
    return {name: relative_rms(found, wide[name].grad) for name, found in gradients.items()}
