"""Training steps of a layer, and the same in float64: output and gradients by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from quasar_kernels.adaptive_reference import adaptive_layer_reference
from quasar_kernels.delta_reference import delta_chunked, delta_recurrence
from quasar_kernels.reference import quasar_chunked, quasar_layer

Step = dict[str, Any]
"""The output under "y", the gradients of the input under "x" and of parameters by their names."""


def step(
    layer: nn.Module,
    x: Tensor,
    dy: Tensor,
    dtype: torch.dtype = torch.float32,
    call: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Step:
    """Run the layer, or `call`, on x [B, T, hidden] under autocast, and backward from dy."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        y = (layer if call is None else call)(x, **kwargs)[0]
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in layer.named_parameters()}


def exact_step(
    layer: Any, x: Tensor, dy: Tensor, bounds: Sequence[int] | None = None, rotation: Any = None
) -> Step:
    """Compute a step in float64; each sequence between `bounds`, or each row, is run separately.

    Args:
        rotation: cos and sin [T, channels] of the adaptive layer, or None.
    """
    weights = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    wide = x.detach().double().requires_grad_()
    run = _run_adaptive if "A_log" in weights else _run_quasar
    places = [slice(a, b) for a, b in pairwise(bounds or (0, x.shape[1])) if a < b]
    tables = [rotation and [t[place].double() for t in rotation] for place in places]
    parts = [run(layer, weights, wide[:, p], t) for p, t in zip(places, tables, strict=True)]
    y = torch.cat(parts, 1)
    y.backward(dy.double())
    return {"y": y.detach(), "x": wide.grad} | {n: w.grad for n, w in weights.items()}


def _run_quasar(_layer: Any, weights: Any, x: Tensor, _rotation: object) -> Tensor:
    H, S = len(weights["beta_log"]), len(weights["o_norm.weight"])
    operator = partial(quasar_chunked, chunk=256)  # fewer chunks need fewer launches
    return quasar_layer(weights, x, num_heads=H, head_dim=S, operator=operator)


def _run_adaptive(layer: Any, weights: Any, x: Tensor, rotation: Any) -> Tensor:
    operator = delta_recurrence if x.shape[1] <= 200 else delta_chunked
    sizes = layer.head_dim, layer.norm_eps
    return adaptive_layer_reference(weights, x, *sizes, rotation, operator)
