"""WKV6: what is compared, its limits and its table."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.wkv6 import (
    CHECKED_TOKENS,
    CHUNK,
    COMPARISON,
    LEAD_AT,
    NAMES,
    RECURRENT,
    draw,
    exact,
    limits,
    selected,
)
from benchmarks.engine.comparison import Shape, results, wide
from benchmarks.engine.limits import missed
from benchmarks.engine.results import Entry, Run
from benchmarks.report.wkv6 import speeds
from quasar_kernels.blocks.wkv6 import wkv6
from quasar_kernels.reference import relative_rms
from tests.benchmarks.runs import changed, run_of


@pytest.mark.parametrize("way", ["forward", "forward and backward"])
def test_a_right_function_is_told_from_a_wrong_one(way):
    torch.manual_seed(0)
    x = draw(Shape(1, 100, 2, 16), "cpu")
    do = torch.randn_like(x["v"])
    expected = results(exact, way, wide(x), do)
    assert set(expected) == ({"o"} if way == "forward" else set(x))
    found = results(lambda x: wkv6(**x)[0], way, x, do)
    assert max(relative_rms(found[t], expected[t]) for t in expected) <= 1e-2

    def wrong(x):
        return wkv6(x["r"], x["k"].flip(1), x["v"], x["w"], 2 * x["u"])[0]

    found = results(wrong, way, x, do)
    assert min(relative_rms(found[t], expected[t]) for t in expected) > 0.1


def test_only_the_first_tokens_are_compared():
    assert set(COMPARISON.checked_tokens.values()) == {CHECKED_TOKENS}
    assert COMPARISON.peak


@pytest.mark.parametrize("name", NAMES)
def test_every_implementation_is_found(name):
    with selected(name) as function:
        assert callable(function)


def row(way, shape, ours, fla):
    errors = {"o": 1e-3} if way == "forward" else dict.fromkeys("rkvwu", 2e-3)
    of = {"way": way, **shape._asdict()}
    for name, ms, peak in (("triton", ours, 1 << 30), (CHUNK, fla, 1 << 31)):
        figures = {"graph_ms": ms, "eager_ms": ms, "peak_bytes": peak}
        yield Entry(table="calls", of=of, by=name, figures=figures, errors=errors)


@pytest.fixture
def run() -> Run:
    """A run that keeps its limits."""
    return run_of(
        "wkv6",
        *row("forward", LEAD_AT, 1.0, 1.6),
        *row("forward and backward", Shape(1, 256, 8, 64), 1.0, 1.1),
        versions={"fla-core": "1.0"},
    )


def test_a_run_within_its_limits_misses_none(run):
    assert missed(limits(run)) == []


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("calls/1/figures/graph_ms", 1.4, "times chunk_rwkv6, graph: 1.4, limit 1.5"),
        ("calls/2/figures/graph_ms", 1.2, "times chunk_rwkv6, graph"),
        ("calls/3/figures/eager_ms", 0.9, "times chunk_rwkv6, eager"),
        ("calls/0/errors/o", 0.5, "error of o"),
        ("calls/2/errors/w", 0.5, "error of w"),
        ("calls/2/failure", "OutOfMemoryError: 9 GiB", "timed"),
    ],
)
def test_a_figure_outside_of_its_limit_is_named(run, path, value, text):
    (found,) = missed(limits(changed(run, path, value)))
    assert text in found


def test_the_table_shows_the_run_and_a_call_without_memory(run):
    of = {"way": "forward", **LEAD_AT._asdict()}
    table = speeds(
        run.adding(Entry(table="calls", of=of, by=RECURRENT, failure="OutOfMemoryError: 9 GiB"))
    )
    for text in ("| 65,536 |", "1.60", "2.0e-03", "made up", "2.00"):
        assert text in table
    assert f"{RECURRENT}, forward, 65,536 tokens (OutOfMemoryError: 9 GiB)" in table
