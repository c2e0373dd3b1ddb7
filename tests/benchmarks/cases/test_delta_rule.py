"""The delta rule: what is compared, its limits and its tables."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.delta_rule import (
    BATCHED,
    CHECKED_TOKENS,
    GATED,
    LONG,
    PLAIN,
    RULES,
    WIDE,
    WIDE_BATCHED,
    comparison_of,
    draw,
    exact,
    limits,
    step,
)
from benchmarks.engine.comparison import Shape, part, results, wide
from benchmarks.engine.limits import missed
from benchmarks.engine.results import Entry, Run
from benchmarks.report import delta_rule as page
from benchmarks.report.documents import RESULTS
from quasar_kernels import delta_rule
from quasar_kernels.reference import relative_rms
from tests.benchmarks.runs import changed, run_of

OURS = {
    PLAIN: (delta_rule.chunk_delta_rule, delta_rule.fused_recurrent_delta_rule),
    GATED: (delta_rule.chunk_gated_delta_rule, delta_rule.fused_recurrent_gated_delta_rule),
}
DOCUMENT = RESULTS / "delta-rule.md"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", ["forward", "forward and backward"])
def test_a_right_function_is_told_from_a_wrong_one(rule, way):
    torch.manual_seed(0)
    x = draw(rule, Shape(2, 130, 2, 16), "cpu")
    few, do = part(x, 130, 1), torch.randn(1, 130, 2, 16)
    expected = results(exact, way, wide(few), do)
    assert set(expected) == ({"o"} if way == "forward" else set(x))

    def ours(x, flip=False):
        rest = {name: x[name] for name in ("beta", "g") if name in x}
        return OURS[rule][0](x["q"], x["k"].flip(1) if flip else x["k"], x["v"], **rest)[0]

    found = results(ours, way, few, do)
    assert max(relative_rms(found[t], expected[t]) for t in expected) <= 1e-2
    found = results(lambda x: ours(x, flip=True), way, few, do)
    assert min(relative_rms(found[t], expected[t]) for t in expected) > 0.1


def test_gradients_are_compared_over_the_first_tokens_alone():
    checked = comparison_of(PLAIN, 10_000).checked_tokens
    assert checked == {"forward": 10_000, "forward and backward": CHECKED_TOKENS}


def test_decays_are_those_of_a_fresh_layer():
    torch.manual_seed(0)
    g = draw(GATED, Shape(1, 200, 4096, 1), "cpu")["g"]
    assert (g <= 0).all()
    # the median of A is 8, that of dt .01, and softplus of noise around its inverse near dt
    assert 0.03 < -g.median() < 0.25


@pytest.mark.parametrize("rule", RULES)
def test_a_token_goes_one_state_further(rule):
    x = draw(rule, Shape(3, 1, 2, 8), "cpu")
    state = torch.randn(3, 2, 8, 8)
    before = state.clone()
    o, final = step("triton", OURS[rule][1], x, state)
    assert final is state
    assert not torch.equal(state, before)
    assert o.shape == x["q"].shape


def timed(ms):
    return {"graph_ms": ms, "eager_ms": 2 * ms, "rested_ms": ms}


def row(rule, way, shape, cuda, fla):
    errors = {"o": 1e-3} if way == "forward" else {"q": 1e-3, "k": 2e-3}
    of = {"rule": rule, "way": way, **shape._asdict()}
    for name, ms in {"triton": 2 * cuda, "cuda": cuda, "fla": fla}.items():
        figures = timed(ms) | {"repeats": name != "fla"}
        yield Entry(table="calls", of=of, by=name, figures=figures, errors=errors)


@pytest.fixture
def run() -> Run:
    """A run that keeps its limits: entries of a row are triton, cuda and fla."""
    token = {"rule": PLAIN, "batch": 64, "width": 64, "state_bytes": 1 << 23}
    return run_of(
        "delta_rule",
        *row(PLAIN, "forward", LONG, 1.0, 20.0),
        *row(PLAIN, "forward and backward", BATCHED, 1.0, 1.5),
        *row(GATED, "forward", WIDE, 0.4, 1.0),
        *row(GATED, "forward", WIDE_BATCHED, 1.4, 1.0),
        *(
            Entry(table="decoding", of=token, by=name, figures=timed(ms))
            for name, ms in {"triton": 0.01, "fla": 0.02, "copy": 0.009}.items()
        ),
        versions={"fla-core": "1.0"},
    )


def with_library(run: Run, ms: float) -> Run:
    of = {"rule": GATED, "way": "forward", **WIDE_BATCHED._asdict()}
    entry = Entry(table="calls", of=of, by="flashqla", figures=timed(ms), errors={"o": 4e-3})
    return run.adding(entry)


def test_a_run_within_its_limits_misses_none(run):
    assert missed(limits(run)) == []


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("calls/2/figures/graph_ms", 14.0, "times fla: 14, limit 15"),
        ("calls/2/figures/rested_ms", 14.0, "times fla, from rest: 14, limit 15"),
        ("calls/1/figures/rested_ms", 1.32, "ms from rest: 1.32, limit 1.3"),
        ("calls/5/figures/graph_ms", 0.9, "forward and backward"),
        ("calls/7/figures/rested_ms", 0.5, "ms from rest: 0.5, limit 0.45"),
        ("calls/10/figures/graph_ms", 1.6, "times the fastest other library: 0.625"),
        ("calls/1/errors/o", 0.5, "error of o, cuda"),
        ("calls/3/errors/k", 0.02, "error of k, triton"),
        ("calls/7/figures/repeats", False, "cuda, same bits"),
        ("calls/9/failure", "RuntimeError: no", "32 x 8,192 x 32 x 128, triton, timed: 0"),
        ("decoding/2/figures/graph_ms", 0.007, "share of copy bandwidth"),
        ("decoding/1/figures/graph_ms", 0.009, "decoding, B = 64"),
    ],
)
def test_a_figure_outside_of_its_limit_is_named(run, path, value, text):
    (found,) = missed(limits(changed(run, path, value)))
    assert text in found


def test_the_tables_show_the_run(run):
    text = page.measured(run)
    assert "| 20.0 |" in text
    assert "1 x 1,000,000 x 8 x 64" in text
    assert "2.0e-03 (k)" in text
    assert "90%" in text
    assert "## Limits\n\nAll " in text


def test_a_call_that_fla_refuses_is_named_with_its_reason(run):
    refused = changed(run, "calls/5/failure", "RuntimeError: wrong results\nat all")
    call = "fla, delta rule, forward and backward, 32 x 2,048 x 8 x 64"
    assert f"Not timed: {call} (RuntimeError: wrong results)." in page.measured(refused)
    twice = changed(refused, "calls/8/failure", "RuntimeError: wrong results")
    second = "fla, gated delta rule, forward, 1 x 65,536 x 8 x 128"
    assert f"Not timed: {call}; {second} (RuntimeError: wrong results)." in page.measured(twice)


def test_other_libraries_have_a_table_and_what_is_missing_its_reason(run):
    whole = with_library(run, 0.7)
    whole = whole.model_copy(update={"versions": {"fla-core": "1.0", "flashqla": "0.1"}})
    whole = whole.adding(**{"flashinfer is missing": "ModuleNotFoundError: none"})
    text = page.libraries(whole)
    assert "forward, 32 x 8,192 x 32 x 128 | 1.40 | 1.00 | 0.700 | - | 0.50 |" in text
    assert "x 64 |" not in text
    assert "| libraries | fla-core 1.0, FlashQLA 0.1 |" in text
    assert "Not timed: FlashInfer (ModuleNotFoundError: none)." in text
    assert "4.0e-03 (o)" in page.errors(whole)
    assert "FlashQLA" not in page.errors(run)
    (found,) = missed(limits(with_library(run, 0.9)))
    assert "library: 0.6429, limit 0.666667" in found
