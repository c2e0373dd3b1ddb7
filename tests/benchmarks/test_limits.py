"""Every kind of limit: a committed run with a value beyond it misses this limit alone."""

from importlib import import_module
from typing import Any

import pytest

from benchmarks.engine import limits
from benchmarks.engine.results import DATA, Run, load
from benchmarks.report import layer
from benchmarks.report.layer import load_runs
from tests.benchmarks.runs import changed

PLAIN = {"rule": "delta rule", "way": "forward", "tokens": 1_000_000}
LEARNED = {"rule": "delta rule", "way": "forward and backward", "batch": 32, "tokens": 2048}
GATED = {"rule": "gated delta rule", "way": "forward", "tokens": 65_536}
LARGE = {"rule": "gated delta rule", "way": "forward", "batch": 32, "tokens": 8192}
TOKEN = {"rule": "delta rule", "batch": 64, "width": 64}
STEP = {"hidden_size": 512, "tokens": 65_536}
CHANNELS = {"way": "forward and backward", "tokens": 16_384, "heads": 32}
LIMITS: dict[str, list[tuple[str, str, object, dict[str, Any], str]]] = {
    "operator": [
        ("forward", "figures/graph_ms", 0.1, {"by": "cuda", "tokens": 16_384}, "limit 0.07"),
        ("forward", "figures/peak_bytes", 1 << 40, {"by": "cuda", "tokens": 1_000_000}, "memory"),
        ("forgetting", "errors/o", 0.5, {}, "0 slow heads: 0.5, limit 0.006"),
        ("forgetting", "figures/rested_ms", 9.0, {}, "0 slow heads, over one without early stops"),
        ("accuracy", "errors/worst eighth", 0.5, {"by": "triton"}, "triton, worst eighth: 0.5"),
        ("accuracy", "errors/o", 1e-4, {"by": "triton"}, "layer-like, cuda over triton"),
        ("decoding", "figures/graph_ms", 1e-4, {"by": "copy", "batch": 128}, "copy bandwidth"),
        ("decoding", "figures/eager_ms", 9.0, {"by": "triton"}, "at B = 1, eager_ms: 9"),
    ],
    "operator_training": [
        ("calls", "figures/graph_ms", 0.281, {"by": "cuda"}, "cuda, ms: 0.281, limit 0.28"),
        ("calls", "figures/graph_ms", 1e3, {"by": "cuda", "tokens": 262_144}, "the baseline"),
        ("gradients", "errors/beta", 0.5, {"by": "cuda"}, "beta, 4096 tokens, cuda: 0.5"),
    ],
    "delta-rule": [
        ("calls", "figures/graph_ms", 9.0, {"by": "fla", **PLAIN}, "fla: "),
        ("calls", "figures/rested_ms", 0.5, {"by": "cuda", **GATED}, "rest: 0.5, limit 0.45"),
        ("calls", "errors/o", 0.5, {"by": "cuda", **PLAIN}, "error of o, cuda"),
        ("calls", "errors/k", 0.02, {"by": "triton", **LEARNED}, "error of k, triton"),
        ("calls", "figures/repeats", False, {"by": "cuda", **GATED}, "cuda, same bits"),
        ("calls", "failure", "RuntimeError: no", {"by": "triton", **LARGE}, "triton, timed: 0"),
        ("decoding", "figures/graph_ms", 1e-4, {"by": "copy", **TOKEN}, "copy bandwidth"),
        ("decoding", "figures/graph_ms", 1e-4, {"by": "fla", **TOKEN}, "decoding, B = 64"),
    ],
    "delta-rule-libraries": [
        ("calls", "figures/graph_ms", 1.0, {"by": "flashqla", **LARGE}, "fastest other library")
    ],
    "kda": [
        ("calls", "figures/graph_ms", 1.0, {"by": "fla", **CHANNELS}, "limit 1.5"),
        ("calls", "errors/g", 0.5, {"by": "triton", **CHANNELS}, "error of g"),
        ("calls", "figures/repeats", False, {"by": "triton", **CHANNELS}, "same bits"),
        ("decoding", "figures/graph_ms", 1e-4, {"by": "fla"}, "decoding of 64 sequences"),
    ],
    "layer-accuracy": [
        ("outputs", "errors/y", 9e-3, {}, "1,000 tokens, output against float64, relative RMS"),
        ("outputs", "figures/cosine", 0.99, {}, "output against float64, cosine"),
        ("outputs", "figures/max_difference", 0.2, {}, "float64, largest difference"),
        ("outputs", "figures/reruns_equal", False, {}, "three calls differ in a bit"),
        ("gradients", "errors/x", 0.9, {}, "worst gradient (`x`)"),
        ("decoding", "errors/apart", 0.1, {}, "tokens decoded after"),
        ("exchange", "errors/ours in public", 0.1, {}, "public layer with our weights"),
        ("exchange", "errors/public in ours", 0.1, {}, "our layer with the public one's"),
        ("long runs", "of/tokens", 1, {}, "long sequences that did not run"),
        ("long runs", "errors/slices", 0.1, {"how": "no_grad"}, "in slices against one call"),
    ],
    "layer-training": [
        ("steps", "figures/step_ms", 1e3, {"by": "ours", **STEP}, "times the baseline's speed"),
        ("steps", "figures/forward_ms", 1e3, {"by": "ours", **STEP}, "forward pass, 512 wide"),
        ("steps", "figures/graph_bytes", 1 << 40, {"by": "ours", **STEP}, "memory, GB"),
        ("steps", "figures/reruns_equal", False, {"by": "ours"}, "rerun that differs in a bit: 1"),
        ("gradients", "errors/v_conv1d.weight", 0.1, {}, "worst gradient"),
    ],
    "../h100/adaptive-layer": [
        ("steps", "figures/peak_bytes", 1 << 40, {"batch": 4, "by": "ours"}, "memory"),
        ("steps", "figures/step_ms", 9.0, {"batch": 4, "by": "ours"}, "relative to one sequence"),
        ("steps", "figures/forward_ms", 9.0, {"tokens": 16_384}, "forward pass, 1,536 wide"),
        ("errors", "errors/x", 0.5, {"dtype": "float32"}, "float32, worst gradient"),
    ],
    "../h100/quasar-model": [
        ("steps", "figures/gla_ms", 99.0, {"tokens": 16_384, "by": "ours"}, "24 layers (computed)")
    ],
    "quasar-model-errors": [
        ("errors", "errors/logits", 1.0, {"dtype": "float64"}, "float64, logits")
    ],
    "acceptance": [
        ("validator", "series/tokens_per_sec", [1.0, 1.75e8, 1.75e8], {}, "refute the claim: 1"),
        ("settings", "claim", 1.0, {}, "claim / median"),
        ("settings", "cycle_seconds", 241.0, {}, "measuring from nothing, s: 241, limit 240"),
        ("settings", "confirm_seconds", 61.0, {}, "confirming what was measured"),
        ("agreement", "figures/validator", 1.0, {"tokens": 100_000}, "loop apart"),
    ],
    "../honesty": [
        ("shapes", "figures/refuted", 0.5, {}, "refuted: 0.5, limit 0.0001"),
        ("shapes", "figures/ratio", 0.9, {}, "claim / median: 0.9, limit 0.97"),
    ],
}
"""By file: table, the value's name, the value, the entry's key, and a part of the printed line."""


def missed(run: Run) -> set[str]:
    return set(limits.missed(import_module(f"benchmarks.cases.{run.case}").limits(run)))


@pytest.mark.parametrize(
    ("file", "change"), [(file, change) for file, changes in LIMITS.items() for change in changes]
)
def test_a_value_beyond_its_limit_is_named(file: str, change: Any) -> None:
    table, name, value, of, text = change
    run = load(DATA / f"{file}.json")
    found = missed(changed(run, table, name, value, **of)) - missed(run)
    (line,) = found
    assert text in line


@pytest.mark.parametrize(
    ("tree", "tokens", "figures", "text"),
    [
        ("overlay", 100_000, {"tokens_per_sec": 104e6}, "`layer` scope, M tokens/s: 104, limit"),
        ("overlay", 2048, {"tokens_per_sec": 23e6}, "`layer` scope, fastest process"),
        ("overlay", 1_000_000, {"vram_mb": 10_000.0}, "1,000,000 tokens, peak memory, GB: 10.49"),
        ("overlay", 4096, {"first_call_seconds": 11.0}, "slowest first call with empty caches"),
        ("overlay-ops", 1_000_000, {"tokens_per_sec": 69e6}, "`ops` scope, M tokens/s: 69"),
    ],
)
def test_processes_of_the_layer_beyond_their_limit_are_named(tree, tokens, figures, text):
    runs = load_runs()
    entries = tuple(
        entry.model_copy(update={"figures": {**entry.figures, **figures}})
        if entry.of["tokens"] == tokens
        else entry
        for entry in runs[tree].entries
    )
    other = {**runs, tree: runs[tree].model_copy(update={"entries": entries})}
    (line,) = set(limits.missed(layer.limits(other))) - set(limits.missed(layer.limits(runs)))
    assert text in line


@pytest.mark.parametrize("name", ["operator", "operator_training", "../honesty"])
def test_committed_runs_that_keep_every_limit(name: str) -> None:
    assert missed(load(DATA / f"{name}.json")) == set()
