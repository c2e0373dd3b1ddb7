"""The delta rule, with a decay and without."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.cases.delta_rule import GATED, PLAIN, Rule, draw
from benchmarks.engine.comparison import Inputs
from benchmarks.engine.mechanism import FLA, OURS, Implementation, functions
from quasar_kernels.delta_reference import delta_chunked


def exact(x: Inputs, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the operator exactly, by chunks."""
    scale = x["q"].shape[-1] ** -0.5
    tensors = (x["q"], x["k"], x["v"], x["beta"], x.get("g"))
    return delta_chunked(*tensors, state, bounds, scale=scale)


def implementation(rule: Rule, by: str) -> Implementation:
    """Return this project's functions of a rule, or fla's."""
    name = rule.replace(" ", "_")
    ours: dict[str, Any] = (
        {"module": "quasar_kernels.delta_rule", "keep": "inplace_state"} if by == OURS else {}
    )
    return Implementation(rule, by, functions(partial(draw, rule), exact, name, **ours))


IMPLEMENTATIONS = {
    "delta": implementation(PLAIN, OURS),
    "delta-fla": implementation(PLAIN, FLA),
    "gated-delta": implementation(GATED, OURS),
    "gated-delta-fla": implementation(GATED, FLA),
}
