"""RWKV-6."""

from __future__ import annotations

from benchmarks.cases.wkv6 import draw, exact
from benchmarks.engine.mechanism import (
    FLA,
    OURS,
    Calls,
    Implementation,
    calls,
    functions,
    one_by_one,
)
from quasar_kernels.decay_reference import wkv6_recurrence


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
