"""Quasar: the delta rule with an exact step size."""

from __future__ import annotations

from torch import Tensor

from benchmarks.cases.operator import exact, named
from benchmarks.engine.comparison import Inputs, Shape
from benchmarks.engine.inputs import layer_like
from benchmarks.engine.mechanism import (
    OURS,
    Bounds,
    Calls,
    Implementation,
    calls,
    imported,
)


def draw(shape: Shape, device: str) -> Inputs:
    """Draw q, k, v and beta with the distribution in a layer with default weights."""
    return named(layer_like(shape.tokens, shape.batch, shape.heads, shape.width, device))


def make(device: str) -> Calls:
    chunk_quasar, fused_recurrent_quasar = imported(
        "fla.ops.quasar", "chunk_quasar", "fused_recurrent_quasar"
    )

    def chunks(x: Inputs, bounds: Bounds | None) -> Tensor:
        o: Tensor = chunk_quasar(**x, cu_seqlens=bounds and bounds.host)[0]
        return o

    def step(x: Inputs, state: Tensor) -> Tensor:
        o: Tensor = fused_recurrent_quasar(**x, initial_state=state, inplace_state=True)[0]
        return o

    return calls(draw, exact, device, chunks=chunks, step=step)


IMPLEMENTATIONS = {
    "quasar": Implementation("Quasar", OURS, make),
}
