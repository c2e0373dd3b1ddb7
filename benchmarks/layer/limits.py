"""What the layer must reach on an H200: every limit, and whether the committed figures keep it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.engine.limits import Criterion
from benchmarks.layer.results import LayerAccuracy
from harness.report import Report

SPEED = {512: 2.5e6, 2048: 8e6, 16_384: 40e6, 100_000: 105e6, 1_000_000: 140e6}
"""Least tokens/s in the validator's loop, by tokens, with the layer published."""
QUIET_SPEED = {512: 7e6, 1024: 12e6, 2048: 24e6}
"""The same where the host is quiet, which it was for the fastest of the processes."""
OPS_SPEED = {1_000_000: 70e6}
"""The same with the operator alone published, under the fork's own layer."""
PEAK_BYTES = {1_000_000: 10e9}
"""Most memory in that loop: a card of 24 GB then reaches a million tokens."""
FIRST_CALL_SECONDS = 10.0
"""Longest first call of a fresh process with empty kernel caches, at every length."""

OUTPUT_ERROR, OUTPUT_COSINE, OUTPUT_DIFFERENCE = 8e-3, 0.9999, 0.1
"""Relative RMS error, cosine and largest difference of outputs against float64."""
EXCHANGE_ERROR = 1e-2
"""Relative RMS error of the public layer with our weights, and of ours with its weights: they are
one function, but the public layer rounds more often."""
GRADIENT_ERROR = 2e-2
"""Relative RMS error of every gradient against float64."""
LONG_RUNS = {("training", 5_000_000), ("slices", 10_000_000)}
"""Sequences of so many tokens must run, in these ways."""


def speed(report: Report, tokens: int) -> float:
    """Return the median tokens/s at a length."""
    return median(m.tokens_per_sec for m in report.by_length()[tokens])


def criteria(layer: Report, ops: Report, accuracy: LayerAccuracy) -> list[Criterion]:
    """Return every limit with its figure."""
    return [*_costs(layer, ops), *_errors(accuracy), *_behaviour(accuracy)]


def _costs(layer: Report, ops: Report) -> Iterator[Criterion]:
    for report, scope, limits in ((layer, "layer", SPEED), (ops, "ops", OPS_SPEED)):
        for tokens, limit in limits.items():
            what = f"{tokens:,} tokens, `{scope}` scope, M tokens/s"
            yield Criterion(what, speed(report, tokens), limit, True, 1e-6, ".1f")
    for tokens, limit in QUIET_SPEED.items():
        fastest = max(m.tokens_per_sec for m in layer.by_length()[tokens])
        what = f"{tokens:,} tokens, `layer` scope, fastest process, M tokens/s"
        yield Criterion(what, fastest, limit, True, 1e-6, ".1f")
    for tokens, most in PEAK_BYTES.items():
        peak = max(m.vram_mb for m in layer.by_length()[tokens]) * 2**20
        yield Criterion(f"{tokens:,} tokens, peak memory, GB", peak, most, False, 1e-9, ".2f")
    first = max(m.first_call_seconds for m in layer.measurements if m.cache == "cold")
    yield Criterion(
        "slowest first call with empty caches, s", first, FIRST_CALL_SECONDS, digits=".1f"
    )


def _errors(accuracy: LayerAccuracy) -> Iterator[Criterion]:
    for found in accuracy.outputs:
        where = f"{found.tokens:,} tokens, output against float64"
        yield Criterion(f"{where}, relative RMS", found.relative_rms, OUTPUT_ERROR, digits=".1e")
        yield Criterion(f"{where}, cosine", found.cosine, OUTPUT_COSINE, True, digits=".6f")
        yield Criterion(f"{where}, largest difference", found.max_difference, OUTPUT_DIFFERENCE)
    for gradients in accuracy.gradients:
        worst = max(gradients.errors, key=lambda name: gradients.errors[name])
        what = f"{gradients.tokens:,} tokens, worst gradient (`{worst}`), relative RMS"
        yield Criterion(what, gradients.errors[worst], GRADIENT_ERROR, digits=".1e")


def _behaviour(accuracy: LayerAccuracy) -> Iterator[Criterion]:
    decoding, exchange = accuracy.decoding, accuracy.exchange
    what = f"{decoding.decoded} tokens decoded after {decoding.prefill:,} against one call"
    yield Criterion(f"{what}, relative RMS", decoding.apart, OUTPUT_ERROR, digits=".1e")
    for what, value in (
        ("public layer with our weights, loaded strictly", exchange.ours_in_public),
        ("our layer with the public one's weights, loaded strictly", exchange.public_in_ours),
    ):
        yield Criterion(f"{what}, relative RMS", value, EXCHANGE_ERROR, digits=".1e")
    unequal = sum(not found.reruns_equal for found in accuracy.outputs)
    yield Criterion("lengths at which three calls differ in a bit", unequal, 0)
    missing = LONG_RUNS - {(run.how, run.tokens) for run in accuracy.long_runs}
    yield Criterion("long sequences that did not run", len(missing), 0)
    for run in accuracy.long_runs:
        if run.slices_apart is not None:
            what = f"{run.tokens:,} tokens in slices against one call, relative RMS"
            yield Criterion(what, run.slices_apart, OUTPUT_ERROR, digits=".1e")
