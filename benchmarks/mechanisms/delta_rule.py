"""The delta rule, with a decay and without."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.cases.delta_rule import GATED, PLAIN, Rule, draw, exact
from benchmarks.engine.mechanism import FLA, OURS, Implementation, functions


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
