"""The implementations that are compared, by name; imported when first called.

`triton` and `cuda` are this project's operator with QUASAR_BACKEND of that name; `peer` is
flash-linear-attention's delta rule, given the step size.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from unittest.mock import patch

from torch import Tensor

from benchmarks.engine.clocks import eager_ms, graph_ms, rested_ms
from benchmarks.operator.results import Timing
from harness.tuning.inputs import Inputs
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
    with patch.dict(os.environ, {SWITCH: name}):
        yield overlay


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


def timing(call: Callable[[], object], rested: bool = False) -> Timing:
    """Time one call as a graph and eagerly, and from rest where that is asked for."""
    from_rest = rested_ms(call) if rested else None
    return Timing(graph_ms=graph_ms(call), eager_ms=eager_ms(call), rested_ms=from_rest)


def peer_version(names: Sequence[str]) -> str | None:
    """Return the peer's package and version, where it is measured."""
    return f"fla-core {metadata.version('fla-core')}" if "peer" in names else None


def add_choice(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let a command leave implementations out."""
    parser.add_argument("--without", choices=NAMES[1:], action="append", default=[])
    parser.add_argument("--quick", action="store_true", help="the same as --without peer")
    return parser


def chosen(args: argparse.Namespace) -> list[str]:
    """Return the names of what is measured."""
    left_out = {*args.without, *(("peer",) if args.quick else ())}
    return [name for name in NAMES if name not in left_out]
