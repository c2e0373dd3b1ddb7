"""The committed run of the operator, its limits, and its page."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.engine.limits import missed
from benchmarks.nsight.results import bytes_ms, floor_ms
from benchmarks.operator.page import Runs, limits, load_runs, plot
from benchmarks.operator.results import ERRORS, FORWARD_MS, OperatorResults
from benchmarks.operator.training_results import TRAINING_MS
from benchmarks.sanitizer.calls import CASES
from benchmarks.sanitizer.results import misses as sanitizer_misses
from tests.benchmarks.runs import changed


@pytest.fixture(scope="module")
def runs() -> Runs:
    return load_runs()


@pytest.fixture(scope="module")
def results(runs: Runs) -> OperatorResults:
    return runs.operator


def test_every_figure_is_within_its_limit(runs: Runs) -> None:
    assert missed(limits(runs)) == []


def test_the_run_covers_every_limit(results: OperatorResults) -> None:
    for lengths in FORWARD_MS.values():
        assert set(lengths) <= {row.tokens for row in results.forward}
    checked = {(row.tokens, row.keys) for row in results.accuracy}
    assert checked == {(row.tokens, keys) for row in results.forward for keys in ERRORS}
    assert max(row.batch for row in results.decoding) == 128
    for times in [r.times for r in results.forward] + [r.times for r in results.decoding]:
        assert {"triton", "peer"} <= set(times)
    for row in results.forward:
        assert set(row.times) == {"triton", "cuda", "peer"}
    # with empty caches: what compiles the kernels anew on a validator's machine
    assert set(results.first_call) == {"triton", "cuda", "peer"}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            "forward.0.times.triton.graph_ms",
            9.0,
            "forward of 2048 tokens, triton, ms: 9, limit 0.06",
        ),
        ("forward.1.times.cuda.graph_ms", 0.1, "16384 tokens, cuda, ms: 0.1, limit 0.07"),
        ("forgetting.0.error", 0.5, "error of 200000 tokens, 0 slow heads: 0.5, limit 0.006"),
        ("forgetting.3.rested_ms", 9.0, "forward of 200000 tokens, 8 slow heads, over in full"),
        ("first_call.cuda.call_seconds", 8.1, "first call, cuda, s: 8.1, limit 8"),
        ("accuracy.1.errors.triton.overall", 0.5, "2048 tokens, correlated 10%, triton: 0.5"),
        ("accuracy.2.errors.triton.worst_eighth", 0.5, "correlated 1%, triton, worst eighth: 0.5"),
        ("accuracy.0.errors.triton.overall", 1e-4, "2048 tokens, layer-like, cuda over triton"),
        ("memory.peak_bytes.triton", 1 << 40, "peak memory over the output, triton"),
        ("first_call.triton.call_seconds", 41.0, "first call, triton, s: 41, limit 8"),
        ("decoding.3.copy_ms", 1e-4, "share of copy bandwidth, B = 128"),
        ("decoding.0.times.triton.eager_ms", 9.0, "decoding at B = 1, eager_ms: 9"),
        (
            "training.0.times.cuda.graph_ms",
            0.281,
            "1 x 16384 x 8 x 64, cuda, ms: 0.281, limit 0.28",
        ),
        ("training.1.times.cuda.graph_ms", 1e3, "1 x 262144 x 8 x 64, cuda, times the peer"),
        ("training.1.times.triton.graph_ms", 1e3, "1 x 262144 x 8 x 64, triton, times the peer"),
        ("gradients.errors.cuda.beta", 0.5, "gradient of beta, cuda: 0.5"),
    ],
)
def test_a_figure_outside_of_its_limit_is_named(
    runs: Runs, path: str, value: float, said: str
) -> None:
    of = "operator" if path.split(".")[0] in OperatorResults.model_fields else "training"
    other = runs._replace(**{of: changed(getattr(runs, of), path, value)})
    (found,) = set(missed(limits(other))) - set(missed(limits(runs)))
    assert said in found


def test_training_covers_every_limit(runs: Runs) -> None:
    trained = runs.training
    assert set(TRAINING_MS) <= {row.shape for row in trained.training}
    measured = [set(trained.gradients.errors), *(set(row.times) for row in trained.training)]
    assert all(names == {"triton", "cuda", "peer"} for names in measured)


def test_the_plot_draws_a_line_for_each_implementation_and_way(results: OperatorResults) -> None:
    root = ElementTree.fromstring(plot(results))  # noqa: S314 made a line above
    labels = {e.text for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Triton, graph", "Triton, eager", "peer, graph", "peer, eager"} <= labels
    points = sum(2 * len(row.times) for row in results.forward)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == points


def test_the_profile_is_of_both_calls_and_no_kernel_beats_its_floor(runs: Runs) -> None:
    assert set(runs.profile.calls) == {"operator", "layer"}
    for call in runs.profile.calls.values():
        assert sum(kernel.ms for kernel in call.kernels) >= bytes_ms(runs.profile, call.least_bytes)
        for kernel in call.kernels:
            assert kernel.ms >= 0.9 * floor_ms(runs.profile, kernel)


def test_the_sanitizer_watched_every_call_with_every_tool(runs: Runs) -> None:
    assert sanitizer_misses(runs.sanitizer) == []
    calls = {name: len(cases) for name, (_, cases) in CASES.items()}
    assert runs.sanitizer.calls == calls
    for tool, watched in runs.sanitizer.tools.items():
        # racecheck leaves the layer out only where it reports a right kernel
        assert set(watched.calls) == set(calls) or (tool == "racecheck" and watched.handshake)
