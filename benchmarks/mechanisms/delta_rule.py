"""The delta rule, with a decay and without."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from benchmarks.cases.delta_rule import GATED, PLAIN, Rule, draw
from benchmarks.engine.comparison import Inputs
from benchmarks.engine.mechanism import (
    FLA,
    OURS,
    Bounds,
    Calls,
    Implementation,
    calls,
    imported,
    packed,
)
from quasar_kernels.delta_reference import delta_chunked


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator exactly, by chunks."""
    scale = x["q"].shape[-1] ** -0.5
    tensors = (x["q"], x["k"], x["v"], x["beta"], x.get("g"))
    return delta_chunked(*tensors, state, bounds, scale=scale)


def make(rule: Rule, by: str, device: str) -> Calls:
    """Return the calls of this project's functions, or of fla's."""
    name = rule.replace(" ", "_")
    module = "quasar_kernels.delta_rule" if by == OURS else f"fla.ops.{name}"
    chunk, recurrent = imported(module, f"chunk_{name}", f"fused_recurrent_{name}")
    keep = {"inplace_state": True} if by == OURS else {"output_final_state": True}

    def chunks(x: Inputs, bounds: Bounds | None) -> Tensor:
        o: Tensor = chunk(**x, **packed(bounds))[0]
        return o

    def step(x: Inputs, state: Tensor) -> Tensor:
        o: Tensor = recurrent(**x, initial_state=state, **keep)[0]
        return o

    return calls(partial(draw, rule), exact, device, chunks=chunks, step=step)


IMPLEMENTATIONS = {
    "delta": Implementation(PLAIN, OURS, partial(make, PLAIN, OURS)),
    "delta-fla": Implementation(PLAIN, FLA, partial(make, PLAIN, FLA)),
    "gated-delta": Implementation(GATED, OURS, partial(make, GATED, OURS)),
    "gated-delta-fla": Implementation(GATED, FLA, partial(make, GATED, FLA)),
}
