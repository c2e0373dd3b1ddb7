"""The implementations that benchmark_operator.py compares, by name; imported when first called."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from operator_bench import Inputs
from torch import Tensor

from quasar_kernels.reference import step_size

Operator = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def overlay(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Apply this project's operator."""
    from fla.ops.quasar import chunk_quasar

    return chunk_quasar(q, k, v, beta)[0]  # type: ignore[no-any-return]


def peer(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Apply flash-linear-attention's delta rule with the step size computed by torch."""
    from fla.ops.delta_rule import chunk_delta_rule

    alpha = step_size(k.float().square().sum(-1), beta)
    return chunk_delta_rule(q, k, v, alpha, scale=1.0)[0]  # type: ignore[no-any-return]


OPERATORS: Mapping[str, Operator] = {"overlay": overlay, "peer": peer}


def decoders(inputs: Inputs) -> Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Return the calls that take a state one token further, by implementation."""
    from fla.ops.delta_rule import fused_recurrent_delta_rule
    from fla.ops.quasar import fused_recurrent_quasar

    q, k, v, beta = inputs
    alpha = step_size(k.float().square().sum(-1), beta)
    return {
        "overlay": lambda s: fused_recurrent_quasar(*inputs, s, inplace_state=True),
        "peer": lambda s: fused_recurrent_delta_rule(q, k, v, alpha, 1.0, s, True),
    }
