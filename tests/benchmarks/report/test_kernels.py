"""The committed runs of the operator and its kernels, their limits, and their page."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.cases import gpu_tests, nsight, operator, operator_training, sanitizer
from benchmarks.cases.operator import BASELINE, ERRORS, FORWARD_MS, NAMES
from benchmarks.cases.sanitizer_calls import CASES
from benchmarks.engine.comparison import shape_of
from benchmarks.engine.limits import missed
from benchmarks.engine.results import DATA, Run, load
from benchmarks.report import kernels
from tests.benchmarks.runs import changed

LIMITS = {"operator": operator.limits, "operator_training": operator_training.limits}


@pytest.fixture(scope="module")
def run() -> Run:
    return load(DATA / "operator.json")


def place(table: str, by: str, **of: object) -> str:
    """Return the path of an entry of the committed runs."""
    name = "operator_training" if table in ("calls", "gradients") else "operator"
    entries = load(DATA / f"{name}.json").table(table)
    fitting = (n for n, e in enumerate(entries) if e.by == by and of.items() <= e.of.items())
    return f"{table}/{next(fitting)}"


def test_every_figure_is_within_its_limit() -> None:
    for name, limits in LIMITS.items():
        assert missed(limits(load(DATA / f"{name}.json"))) == []
    assert gpu_tests.misses(load(DATA / "gpu-tests.json")) == []


def test_the_run_covers_every_limit(run: Run) -> None:
    forward, tokens = run.rows("forward"), run.rows("decoding")
    for lengths in FORWARD_MS.values():
        assert set(lengths) <= {row.of["tokens"] for row in forward}
    checked = {(row.of["tokens"], row.of["keys"]) for row in run.rows("accuracy")}
    assert checked == {(row.of["tokens"], keys) for row in forward for keys in ERRORS}
    assert max(row.of["batch"] for row in tokens) == 128
    assert all(set(row.by) == set(NAMES) for row in forward)
    assert all(set(row.by) == {"triton", BASELINE, "copy"} for row in tokens)
    # with empty caches: the kernels are compiled on a validator's machine
    assert {entry.by for entry in run.table("first call")} == set(NAMES)


@pytest.mark.parametrize(
    ("entry", "figure", "value", "text"),
    [
        (("forward", "triton", 2048), "figures/graph_ms", 9.0, "triton, ms: 9, limit 0.06"),
        (("forward", "cuda", 16_384), "figures/graph_ms", 0.1, "cuda, ms: 0.1, limit 0.07"),
        (("forward", "triton", 1_000_000), "figures/peak_bytes", 1 << 40, "over the output"),
        (("forgetting", "cuda", 200_000), "errors/o", 0.5, "0 slow heads: 0.5, limit 0.006"),
        (("forgetting", "cuda", 200_000), "figures/rested_ms", 9.0, "0 slow heads, over in full"),
        (("first call", "cuda", None), "figures/call_seconds", 8.1, "cuda, s: 8.1, limit 8"),
        (("accuracy", "triton", 2048), "errors/worst eighth", 0.5, "worst eighth: 0.5"),
        (("accuracy", "triton", 2048), "errors/o", 1e-4, "layer-like, cuda over triton"),
        (("decoding", "copy", 128), "figures/graph_ms", 1e-4, "share of copy bandwidth, B = 128"),
        (("decoding", "triton", 1), "figures/eager_ms", 9.0, "decoding at B = 1, eager_ms: 9"),
        (("calls", "cuda", 16_384), "figures/graph_ms", 0.281, "cuda, ms: 0.281, limit 0.28"),
        (("calls", "cuda", 262_144), "figures/graph_ms", 1e3, "cuda, times the baseline"),
        (("calls", "triton", 262_144), "figures/graph_ms", 1e3, "triton, times the baseline"),
        (("gradients", "cuda", None), "errors/beta", 0.5, "gradient of beta, cuda: 0.5"),
    ],
)
def test_a_figure_outside_of_its_limit_is_named(entry, figure, value, text) -> None:
    table, by, size = entry
    name = "operator_training" if table in ("calls", "gradients") else "operator"
    of = {} if size is None else {"batch" if table == "decoding" else "tokens": size}
    whole = load(DATA / f"{name}.json")
    other = changed(whole, f"{place(table, by, **of)}/{figure}", value)
    (found,) = set(missed(LIMITS[name](other))) - set(missed(LIMITS[name](whole)))
    assert text in found


def test_training_covers_every_limit() -> None:
    run = load(DATA / "operator_training.json")
    rows = run.rows("calls")
    assert set(operator_training.MOST_MS) <= {shape_of(row.of) for row in rows}
    assert all(set(row.by) == set(NAMES) for row in [*rows, *run.rows("gradients")])


def test_the_plot_draws_a_line_for_each_implementation_and_way(run: Run) -> None:
    root = ElementTree.fromstring(kernels.plot(run))  # noqa: S314 made a line above
    labels = {e.text for e in root.iter("{http://www.w3.org/2000/svg}text")}
    names = ("Triton", "CUDA", "baseline")
    assert {f"{name}, {how}" for name in names for how in ("graph", "eager")} <= labels
    points = 2 * len(run.table("forward"))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == points


def test_the_profile_is_of_both_calls_and_no_kernel_beats_its_floor() -> None:
    run = load(DATA / "profile.json")
    kernels_of = run.table("kernels")
    assert {call.of["call"] for call in run.table("calls")} == {"operator", "layer"}
    for call in run.table("calls"):
        ms = sum(k.figures["ms"] for k in kernels_of if k.of["call"] == call.of["call"])
        assert ms >= nsight.bytes_ms(run, call.figures["least_bytes"])
    for kernel in kernels_of:
        assert kernel.figures["ms"] >= 0.9 * nsight.floor_ms(run, kernel)


def test_the_sanitizer_watched_every_call_with_every_tool() -> None:
    run = load(DATA / "sanitizer.json")
    assert sanitizer.misses(run) == []
    for name, (_, cases) in CASES.items():
        assert run.settings[f"{name} calls"] == len(cases)
    for tool in run.table("tools"):
        # racecheck leaves the layer out only where it reports a right kernel
        watched = set(tool.texts["calls"].split())
        assert watched == set(CASES) or (tool.by == "racecheck" and tool.figures["handshake"])
