"""The implementations that benchmark_operator.py compares, by name; imported when first called.

`triton` and `cuda` are this project's operator with QUASAR_BACKEND of that name; `peer` is
flash-linear-attention's delta rule, given the step size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from measuring.operator_bench import Inputs
from quasar_kernels.reference import step_size

NAMES = ("triton", "cuda", "peer")
SWITCH = "QUASAR_BACKEND"

Operator = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@contextmanager
def selected(name: str) -> Iterator[Operator]:
    """Give the operator of that name, with the kernels chosen as long as the context lasts."""
    if name == "peer":
        yield peer
        return
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = name
    try:
        yield overlay
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


def overlay(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Apply this project's operator."""
    from fla.ops.quasar import chunk_quasar

    return chunk_quasar(q, k, v, beta)[0]  # type: ignore[no-any-return]


def peer(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Apply flash-linear-attention's delta rule with the step size computed by torch."""
    from fla.ops.delta_rule import chunk_delta_rule

    alpha = step_size(k.float().square().sum(-1), beta)
    return chunk_delta_rule(q, k, v, alpha, scale=1.0)[0]  # type: ignore[no-any-return]


def decoders(inputs: Inputs) -> Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Return the calls that take a state one token further, by implementation."""
    from fla.ops.delta_rule import fused_recurrent_delta_rule
    from fla.ops.quasar import fused_recurrent_quasar

    q, k, v, beta = inputs
    alpha = step_size(k.float().square().sum(-1), beta)
    return {
        "triton": lambda s: fused_recurrent_quasar(*inputs, s, inplace_state=True),
        "peer": lambda s: fused_recurrent_delta_rule(q, k, v, alpha, 1.0, s, True),
    }
