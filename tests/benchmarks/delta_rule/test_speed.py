"""The delta rule's benchmark: what it compares, its limits and its tables."""

from __future__ import annotations

from datetime import date

import pytest
import torch

from benchmarks.delta_rule import page
from benchmarks.delta_rule.calls import Inputs, draw, exact, step
from benchmarks.delta_rule.results import (
    BATCHED,
    LONG,
    ROWS,
    WIDE,
    WIDE_BATCHED,
    Decoding,
    DeltaRuleResults,
    Row,
    delta_rule_criteria,
    joined,
)
from benchmarks.delta_rule.speed import CHECKED_TOKENS, compared, wide
from benchmarks.engine.limits import missed
from benchmarks.operator.results import Timing
from benchmarks.operator.training_results import Shape
from benchmarks.report.documents import RESULTS
from benchmarks.results import write
from quasar_kernels import delta_rule
from quasar_kernels.reference import relative_rms
from tests.benchmarks.runs import changed
from tests.harness import samples

OURS = {
    "delta rule": (delta_rule.chunk_delta_rule, delta_rule.fused_recurrent_delta_rule),
    "gated delta rule": (
        delta_rule.chunk_gated_delta_rule,
        delta_rule.fused_recurrent_gated_delta_rule,
    ),
}

DOCUMENT = RESULTS / "delta-rule.md"


@pytest.mark.parametrize("rule", OURS)
@pytest.mark.parametrize("way", ["forward", "forward and backward"])
def test_what_is_compared_tells_right_from_wrong(rule, way):
    torch.manual_seed(0)
    x = draw(rule, Shape(2, 130, 2, 16), "cpu")
    part, results = compared(way, x, torch.randn_like(x.q))
    assert part.q.shape[0] == 1
    expected = results(exact, wide(part))
    assert set(expected) == ({"o"} if way == "forward" else set(Inputs._fields[: len(expected)]))
    assert len(expected) == (1 if way == "forward" else 4 + (x.g is not None))
    chunks = OURS[rule][0]
    found = results(chunks, part)
    assert max(relative_rms(found[t], expected[t]) for t in expected) <= 1e-2

    def wrong(q, k, v, **options):
        return chunks(q, k.flip(1), v, **options)

    found = results(wrong, part)
    assert min(relative_rms(found[t], expected[t]) for t in expected) > 0.1


def test_gradients_are_compared_over_the_first_tokens_alone():
    x = draw("delta rule", Shape(2, CHECKED_TOKENS + 5, 1, 4), "cpu")
    part, _ = compared("forward and backward", x, x.q)
    assert part.q.shape == (1, CHECKED_TOKENS, 1, 4)
    assert part.beta.shape == (1, CHECKED_TOKENS, 1)


def test_decays_are_those_of_a_fresh_layer():
    torch.manual_seed(0)
    x = draw("gated delta rule", Shape(1, 200, 4096, 1), "cpu")
    assert x.g is not None
    assert (x.g <= 0).all()
    # the median of A is 8, that of dt .01, and softplus of noise around its inverse near dt
    assert 0.03 < -x.g.median() < 0.25


@pytest.mark.parametrize("rule", OURS)
def test_a_token_goes_one_state_further(rule):
    x = draw(rule, Shape(3, 1, 2, 8), "cpu")
    state = torch.randn(3, 2, 8, 8)
    before = state.clone()
    o, final = step("triton", OURS[rule][1], x, state)
    assert final is state
    assert not torch.equal(state, before)
    assert o.shape == x.q.shape


def timed(ms):
    return Timing(graph_ms=ms, eager_ms=2 * ms, rested_ms=ms)


def with_library(ms):
    """Times of a row where CUDA takes 1.4 ms and the host 1 ms."""
    return {"cuda": timed(1.4), "host": timed(1.0), "flashqla": timed(ms)}


@pytest.fixture
def results():
    """A run that keeps its limits, of figures that nobody measured."""

    def row(rule, way, shape, cuda, host):
        tensors = {"o": 1e-3} if way == "forward" else {"q": 1e-3, "k": 2e-3}
        return Row(
            rule=rule, way=way, shape=shape,
            times={"triton": timed(2 * cuda), "cuda": timed(cuda), "host": timed(host)},
            errors=dict.fromkeys(("triton", "cuda", "host"), tensors),
            repeats={"triton": True, "cuda": True, "host": False},
        )  # fmt: skip

    return DeltaRuleResults(
        created=date(2026, 1, 1), commit=None, environment=samples.environment(),
        protocol="made up", host="host 1.0",
        rows=(
            row("delta rule", "forward", LONG, 1.0, 20.0),
            row("delta rule", "forward and backward", BATCHED, 1.0, 1.5),
            row("gated delta rule", "forward", WIDE, 0.4, 1.0),
            row("gated delta rule", "forward", WIDE_BATCHED, 1.4, 1.0),
        ),
        decoding=(
            Decoding(
                rule="delta rule", batch=64, width=64, state_bytes=1 << 23,
                times={"triton": timed(0.01), "host": timed(0.02)}, copy_ms=0.009,
            ),
        ),
    )  # fmt: skip


def test_a_run_within_its_limits_misses_none(results):
    assert missed(delta_rule_criteria(results)) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("rows.0.times.host.graph_ms", 14.0, "times the host: 14, limit 15"),
        ("rows.0.times.host.rested_ms", 14.0, "times the host, from rest: 14, limit 15"),
        ("rows.0.times.cuda.rested_ms", 1.32, "ms from rest: 1.32, limit 1.3"),
        ("rows.1.times.host.graph_ms", 0.9, "forward and backward"),
        ("rows.2.times.cuda.rested_ms", 0.5, "ms from rest: 0.5, limit 0.45"),
        ("rows.3.times.cuda.graph_ms", 1.6, "times the fastest other library: 0.625"),
        ("rows.3.times", with_library(0.9), "library: 0.6429, limit 0.666667"),
        ("rows.0.errors.cuda.o", 0.5, "error of o, cuda"),
        ("rows.1.errors.triton.k", 0.02, "error of k, triton"),
        ("rows.2.repeats.cuda", False, "cuda, same bits"),
        ("rows.3.failures", {"triton": "RuntimeError: no"}, "32 x 128, triton, timed: 0"),
        ("decoding.0.copy_ms", 0.007, "share of copy bandwidth"),
        ("decoding.0.times.host.graph_ms", 0.009, "decoding, B = 64"),
    ],
)
def test_a_figure_outside_of_its_limit_is_named(results, path, value, said):
    (found,) = missed(delta_rule_criteria(changed(results, path, value)))
    assert said in found


def test_the_tables_say_what_the_run_says(results):
    text = page.measured(results)
    assert "| 20.0 |" in text
    assert "1 x 1,000,000 x 8 x 64" in text
    assert "2.0e-03 (k)" in text
    assert "90%" in text
    assert "## Limits\n\nAll " in text


def test_a_call_that_the_host_refuses_is_named_with_its_reason(results):
    refused = changed(results, "rows.1.failures", {"host": "RuntimeError: wrong results\nat all"})
    assert missed(delta_rule_criteria(refused)) == []
    call = "host, delta rule, forward and backward, 32 x 2,048 x 8 x 64"
    assert f"Not timed: {call} (RuntimeError: wrong results)." in page.measured(refused)
    twice = changed(refused, "rows.2.failures", {"host": "RuntimeError: wrong results"})
    second = "host, gated delta rule, forward, 1 x 65,536 x 8 x 128"
    assert f"Not timed: {call}; {second} (RuntimeError: wrong results)." in page.measured(twice)


def test_other_libraries_have_a_table_of_their_calls_and_what_is_missing_its_reason(results):
    run = changed(results, "rows.3.times", with_library(0.7))
    run = changed(run, "rows.3.errors", {"flashqla": {"o": 4e-3}})
    run = changed(run, "libraries", {"flashqla": "0.1"})
    run = changed(run, "missing", {"flashinfer": "ModuleNotFoundError: none"})
    told = page.libraries(run)
    assert "forward, 32 x 8,192 x 32 x 128 | 1.40 | 1.00 | 0.700 | - | 0.50 |" in told
    assert "x 64 |" not in told
    assert "| libraries | host 1.0, FlashQLA 0.1 |" in told
    assert "Not timed: FlashInfer (ModuleNotFoundError: none)." in told
    assert "4.0e-03 (o)" in page.errors(run)
    assert "FlashQLA" not in page.errors(results)


def test_a_run_that_was_cut_off_names_the_calls_that_it_lacks(results):
    text = page.measured(results)
    assert "cut off before: delta rule, forward, 1 x 16,384 x 8 x 64; gated" in text
    assert "forward, 1 x 1,000,000 x 8 x 64;" in text.partition("cut off before")[2]
    done = results.rows[0].model_copy
    rows = tuple(done(update={"rule": r, "way": w, "shape": s}) for r, w, s in ROWS)
    assert "cut off" not in page.measured(results.model_copy(update={"rows": rows}))


def test_parts_of_a_run_are_joined_in_the_order_of_the_calls(results):
    parts = [
        results.model_copy(update={"rows": results.rows[n::2], "decoding": results.decoding[n:]})
        for n in (0, 1)
    ]
    whole = joined(parts)
    assert whole.decoding == results.decoding
    assert [(row.rule, row.way, row.shape) for row in whole.rows] == [
        call for call in ROWS if call in {(row.rule, row.way, row.shape) for row in results.rows}
    ]
    assert set(map(repr, whole.rows)) == set(map(repr, results.rows))
    assert "spread over 2 GPUs" in whole.protocol
    with pytest.raises(ValueError, match="commit differs"):
        joined([parts[0], parts[1].model_copy(update={"commit": "another"})])


def test_the_page_shows_a_run_once_there_is_one(results, tmp_path, monkeypatch):
    for name in ("RUN", "LIBRARIES_RUN"):
        monkeypatch.setattr(page, name, tmp_path / name)
    assert page.documents()[DOCUMENT].count("No run of it is committed yet.") == 2
    write(page.RUN, results)
    assert "1 x 1,000,000 x 8 x 64" in page.documents()[DOCUMENT]
    write(page.LIBRARIES_RUN, results)
    assert "| libraries | host 1.0 |" in page.documents()[DOCUMENT]
