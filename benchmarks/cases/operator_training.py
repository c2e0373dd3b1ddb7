"""Forward and backward of the operator: this project's and the baseline's.

    python -m benchmarks operator_training --out benchmarks/h200/operator_training.json

The case measures speed, and the gradients' accuracy against float64. The implementations are those
of the case `operator`; --quick omits the baseline.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from benchmarks.cases import operator
from benchmarks.cases.operator import (
    BASELINE,
    OURS,
    baseline_version,
    chosen,
    exact,
    named,
    selected,
)
from benchmarks.engine import clocks
from benchmarks.engine.comparison import CHECKED, Comparison, Shape, Way, shape_of
from benchmarks.engine.inputs import layer_like
from benchmarks.engine.limits import GRADIENT_ERROR, Criterion
from benchmarks.engine.results import Run, start
from quasar_kernels.mount import mount

SHAPES = (
    Shape(1, 16_384, 8, 64),
    Shape(1, 262_144, 8, 64),
    Shape(1, 1_000_000, 8, 64),
    Shape(32, 2048, 8, 64),
    Shape(1, 65_536, 16, 128),
    Shape(4, 16_384, 16, 128),
)
WAY: Way = "forward and backward"
CHECKED_TOKENS = 4096
"""Tokens of the first sequence over which gradients are compared."""

MAX_MS = {Shape(1, 16_384, 8, 64): 0.28, Shape(1, 1_000_000, 8, 64): 9.0}
"""Longest accepted time of CUDA by shape, graph replay."""
LEADS = {"triton": 0.85, "cuda": 2.5}
"""Least speed-up of forward and backward over the baseline, at every shape.

Triton runs where CUDA cannot. At one shape, a batch with heads of 128, it is slower than the
baseline.
"""

PROTOCOL = f"""\
bf16, inputs as a layer with default weights makes them; the output's gradient is noise. Triton \
and CUDA: chunk_quasar with gradients of q, k, v and beta. Baseline: chunk_delta_rule with scale \
1, the step size and its gradient by torch. Gradients of a loss over a call's first 4,096 tokens \
are compared with float64 autograd. {CHECKED} {clocks.CLOCKS}"""

COMPARISON = Comparison(selected, exact, {WAY: CHECKED_TOKENS})
options = operator.options


def measure(args: argparse.Namespace) -> Iterator[Run]:
    names = chosen(args)
    mount()
    torch.manual_seed(0)
    run = start("operator_training", PROTOCOL, args.commit, versions=baseline_version(names))
    with torch.no_grad():
        clocks.soak(2)
        for shape in SHAPES:
            x = named(layer_like(shape.tokens, shape.batch, shape.heads, shape.width))
            do = torch.randn_like(x["q"])
            run = run.adding(*COMPARISON.entries(shape._asdict(), WAY, x, do, names))
            del x
            clocks.free()
            yield run


def limits(run: Run) -> Iterator[Criterion]:
    for row in run.rows("calls"):
        shape = shape_of(row.of)
        text = "forward and backward of {} x {} x {} x {}".format(*shape)
        for name in OURS:
            if (lead := row.ratio("graph_ms", BASELINE, name)) is not None:
                yield Criterion(f"{text}, {name}, times the baseline", lead, LEADS[name], True)
        ms = row.figure("cuda", "graph_ms")
        if ms is not None and shape in MAX_MS:
            yield Criterion(f"{text}, cuda, ms", ms, MAX_MS[shape])
    for entry in (entry for entry in run.entries if entry.by in OURS):
        call = f"{entry.of['tokens']} tokens, {entry.by}"
        if entry.failure:
            yield Criterion(f"forward and backward of {call}, timed", False, True, True)
        for tensor, error in entry.errors.items():
            what = f"error of the gradient of {tensor}, {call}"
            yield Criterion(what, error, GRADIENT_ERROR)
