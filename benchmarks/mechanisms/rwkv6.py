"""RWKV-6."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases.wkv6 import draw
from benchmarks.engine.comparison import Inputs
from benchmarks.engine.mechanism import (
    FLA,
    OURS,
    SEQUENTIAL,
    SEQUENTIAL_TOKENS,
    Calls,
    Implementation,
    calls,
    of_fla,
    one_by_one,
)
from quasar_kernels.blocks.chunked import decayed_attention
from quasar_kernels.decay_reference import wkv6_recurrence


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator exactly, by halving chunks repeatedly."""
    return decayed_attention(x["r"], x["k"], x["v"], x["w"], x["u"], state, bounds)


def make(device: str) -> Calls:
    """Return the calls of this project's operator."""
    from quasar_kernels.blocks.wkv6 import wkv6

    return calls(
        draw,
        exact,
        device,
        chunks=lambda x, bounds: wkv6(**x, cu_seqlens=bounds and bounds.host)[0],
        step=lambda x, state: wkv6(**x, initial_state=state)[0],
    )


def make_fla(device: str) -> Calls:
    """Return the calls of fla's functions."""
    return calls(draw, exact, device, **of_fla("rwkv6", scale=1.0))


def make_sequential(device: str) -> Calls:
    """Return calls that compute the definition token by token."""

    def recur(x: Inputs, state: Tensor | None) -> Tensor:
        return wkv6_recurrence(**x, initial_state=state, dtype=torch.float32)[0]

    return calls(draw, exact, device, **one_by_one(recur))


IMPLEMENTATIONS = {
    "rwkv6": Implementation("RWKV-6", OURS, make),
    "rwkv6-fla": Implementation("RWKV-6", FLA, make_fla),
    "rwkv6-torch": Implementation("RWKV-6", SEQUENTIAL, make_sequential, longest=SEQUENTIAL_TOKENS),
}
