"""RWKV-6."""

from __future__ import annotations

from torch import Tensor

from benchmarks.cases.wkv6 import draw
from benchmarks.engine.comparison import Inputs
from benchmarks.engine.mechanism import (
    FLA,
    OURS,
    Calls,
    Implementation,
    calls,
    functions,
    one_by_one,
)
from quasar_kernels.blocks.chunked import decayed_attention
from quasar_kernels.decay_reference import wkv6_recurrence


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator exactly, by halving chunks repeatedly."""
    return decayed_attention(x["r"], x["k"], x["v"], x["w"], x["u"], state, bounds)


def make(device: str) -> Calls:
    from quasar_kernels.blocks.wkv6 import wkv6

    return calls(
        draw,
        exact,
        device,
        chunks=lambda x, bounds: wkv6(**x, cu_seqlens=bounds and bounds.host)[0],
        step=lambda x, state: wkv6(**x, initial_state=state)[0],
    )


IMPLEMENTATIONS = {
    "rwkv6": Implementation("RWKV-6", OURS, make),
    "rwkv6-fla": Implementation("RWKV-6", FLA, functions(draw, exact, "rwkv6", scale=1.0)),
    "rwkv6-torch": one_by_one("RWKV-6", draw, exact, wkv6_recurrence),
}
