"""WKV6's benchmark: what it compares, its limits and its table."""

from __future__ import annotations

from datetime import date

import pytest
import torch

from benchmarks.engine.limits import missed
from benchmarks.operator.results import Timing
from benchmarks.operator.training_results import Shape
from benchmarks.wkv6.calls import NAMES, TENSORS, draw, exact, implementation
from benchmarks.wkv6.page import speeds
from benchmarks.wkv6.results import LEAD_AT, Row, WKV6Results, wkv6_criteria
from benchmarks.wkv6.speed import CHECKED_TOKENS, compared
from quasar_kernels.blocks.wkv6 import wkv6
from quasar_kernels.reference import relative_rms
from tests.benchmarks.runs import changed
from tests.harness import samples


@pytest.mark.parametrize("way", ["forward", "forward and backward"])
def test_what_is_compared_tells_right_from_wrong(way):
    torch.manual_seed(0)
    x = draw(Shape(1, 100, 2, 16), "cpu")
    results = compared(way, x, torch.randn_like(x.v))
    expected = results(exact, torch.float64)
    assert tuple(expected) == (("o",) if way == "forward" else TENSORS)
    found = results(wkv6, torch.bfloat16)
    assert max(relative_rms(found[t], expected[t]) for t in expected) <= 1e-2

    def wrong(r, k, v, w, u):
        return wkv6(r, k.flip(1), v, w, 2 * u)

    found = results(wrong, torch.bfloat16)
    assert min(relative_rms(found[t], expected[t]) for t in expected) > 0.1


def test_only_the_first_tokens_are_compared():
    x = draw(Shape(1, CHECKED_TOKENS + 5, 1, 4), "cpu")
    seen: list[torch.Tensor] = []

    def function(*given):
        seen.extend(given)
        return given[:2]

    compared("forward", x, x.v)(function, torch.bfloat16)
    assert [y.shape for y in seen] == [(1, CHECKED_TOKENS, 1, 4)] * 4 + [(1, 4)]
    assert [y.dtype for y in seen] == [torch.bfloat16] * 3 + [torch.float32] * 2


def test_every_implementation_is_found():
    assert all(callable(implementation(name)) for name in NAMES)


def timed(ms):
    return Timing(graph_ms=ms, eager_ms=ms)


@pytest.fixture
def results():
    """A run that keeps its limits, of figures that nobody measured."""

    def row(way, shape, ours, host):
        tensors = {"o": 1e-3} if way == "forward" else dict.fromkeys(TENSORS, 2e-3)
        return Row(
            way=way, shape=shape, times={"triton": timed(ours), "chunk": timed(host)},
            peak_bytes={"triton": 1 << 30, "chunk": 1 << 31},
            errors={"triton": tensors, "chunk": tensors},
        )  # fmt: skip

    return WKV6Results(
        created=date(2026, 1, 1), commit=None, environment=samples.environment(),
        protocol="made up", host="host 1.0",
        rows=(
            row("forward", LEAD_AT, 1.0, 1.6),
            row("forward and backward", Shape(1, 256, 8, 64), 1.0, 1.1),
        ),
    )  # fmt: skip


def test_a_run_within_its_limits_misses_none(results):
    assert missed(wkv6_criteria(results)) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("rows.0.times.chunk.graph_ms", 1.4, "times chunk_rwkv6, graph: 1.4, limit 1.5"),
        ("rows.1.times.triton.graph_ms", 1.2, "times chunk_rwkv6, graph"),
        ("rows.1.times.chunk.eager_ms", 0.9, "times chunk_rwkv6, eager"),
        ("rows.0.errors.triton.o", 0.5, "error of o"),
        ("rows.1.errors.triton.w", 0.5, "error of w"),
        ("rows.1.failures", {"triton": "OutOfMemoryError: 9 GiB"}, "timed"),
    ],
)
def test_a_figure_outside_of_its_limit_is_named(results, path, value, said):
    (found,) = missed(wkv6_criteria(changed(results, path, value)))
    assert said in found


def test_the_table_says_what_the_run_says(results):
    table = speeds(results)
    assert "| 65,536 |" in table
    assert "1.60" in table
    assert "2.0e-03" in table
    assert "made up" in table


def test_a_call_without_memory_is_named(results):
    found = changed(results, "rows.1.failures", {"recurrent": "OutOfMemoryError: 9 GiB"})
    assert missed(wkv6_criteria(found)) == []
    told = "fused_recurrent_rwkv6, forward and backward, 256 tokens (OutOfMemoryError: 9 GiB)"
    assert told in speeds(found)
