"""Training steps of a layer: output and gradients by name, and what they are in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from quasar_kernels.reference import quasar_chunked, quasar_layer

Step = dict[str, Any]
"""The output "y", and the gradients of the input, "x", and of the parameters, by their names."""


def step(
    layer: nn.Module,
    x: Tensor,
    dy: Tensor,
    dtype: torch.dtype = torch.float32,
    call: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Step:
    """Call the layer, or what calls it, on x [B, T, hidden] under autocast; go backward from dy."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        # a compiled module has no truth value
        y = (layer if call is None else call)(x, **kwargs)[0]
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in layer.named_parameters()}


def exact_step(
    layer: nn.Module, x: Tensor, dy: Tensor, bounds: Sequence[int] | None = None
) -> Step:
    """The same in float64, of the sequences between bounds, each alone; None for one a row."""
    weights = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    wide = x.detach().double().requires_grad_()
    parts = [wide[:, a:b] for a, b in pairwise(bounds or (0, x.shape[1])) if a < b]
    H, S = len(weights["beta_log"]), len(weights["o_norm.weight"])
    operator = partial(quasar_chunked, chunk=256)  # long ones, since each is a few launches
    run = partial(quasar_layer, weights, num_heads=H, head_dim=S, operator=operator)
    y = torch.cat([run(part) for part in parts], 1)
    y.backward(dy.double())
    return {"y": y.detach(), "x": wide.grad} | {n: w.grad for n, w in weights.items()}
