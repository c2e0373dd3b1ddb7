"""The layer's document: its limits, its profile by step, the floors, and its plots."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from benchmarks.cases.layer import OPS_SPEED, PEAK_BYTES, QUIET_SPEED, SPEED, by_length
from benchmarks.cases.layer_profile import launches_of
from benchmarks.cases.trees import TREES
from benchmarks.engine.results import DATA, Entry, Run, load
from benchmarks.report.layer import (
    FIRST_CALL,
    IN_README,
    MEMORY,
    Runs,
    bound_of,
    limits,
    load_runs,
    plot,
    shares_of_bound,
)
from benchmarks.report.layer import SPEED as SPEEDS
from benchmarks.report.layer import TREES as LABELS
from benchmarks.report.layer_steps import OTHER, STEPS, find_steps, profile_table, short_name
from harness.workload import LENGTHS
from tests.benchmarks.runs import changed

SMALL = "void at::native::(anonymous namespace)::small<int>(int)"
CUBLAS = "nvjet_sm90_tst_256x128_64x4"


@pytest.fixture(
    scope="module", params=["layer-profile", "layer-profile-ops", "layer-profile-portable"]
)
def profile(request: pytest.FixtureRequest) -> Run:
    return load(DATA / f"{request.param}.json")


@pytest.fixture(scope="module")
def runs() -> Runs:
    return load_runs()


def altered(runs: Runs, tree: str, change: Callable[[Entry], dict[str, float]]) -> Runs:
    """Return the runs with other figures of some processes of one tree."""
    entries = tuple(
        entry.model_copy(update={"figures": {**entry.figures, **change(entry)}})
        for entry in runs[tree].entries
    )
    return {**runs, tree: runs[tree].model_copy(update={"entries": entries})}


def at(tokens: int, **figures: float) -> Callable[[Entry], dict[str, float]]:
    return lambda entry: figures if entry.of["tokens"] == tokens else {}


def verdicts(runs: Runs) -> dict[str, str]:
    return {c.cells()[0]: c.cells()[3] for c in limits(runs)}


@pytest.mark.parametrize(("value", "verdict"), [(0.999, "missed"), (1.001, "met")])
@pytest.mark.parametrize(
    ("tree", "scope", "speeds"), [("overlay", "layer", SPEED), ("overlay-ops", "ops", OPS_SPEED)]
)
def test_speeds_are_judged_by_scope(
    runs: Runs, tree: str, scope: str, speeds: dict[int, float], value: float, verdict: str
) -> None:
    for tokens, limit in speeds.items():
        found = verdicts(altered(runs, tree, at(tokens, tokens_per_sec=value * limit)))
        assert found[f"{tokens:,} tokens, `{scope}` scope, M tokens/s"] == verdict


@pytest.mark.parametrize(("value", "verdict"), [(0.999, "missed"), (1.001, "met")])
def test_short_calls_are_judged_by_the_quietest_host(
    runs: Runs, value: float, verdict: str
) -> None:
    for tokens, limit in QUIET_SPEED.items():

        def speed(entry: Entry, tokens: int = tokens, limit: float = limit) -> dict[str, float]:
            if entry.of["tokens"] != tokens:
                return {}
            return {"tokens_per_sec": 1e6 if entry.of["process"] else value * limit}

        found = verdicts(altered(runs, "overlay", speed))
        assert found[f"{tokens:,} tokens, `layer` scope, fastest process, M tokens/s"] == verdict


def test_memory_and_first_calls_are_judged(runs: Runs) -> None:
    for tokens, most in PEAK_BYTES.items():
        for size, verdict in ((1.001 * most, "missed"), (0.999 * most, "met")):
            found = verdicts(altered(runs, "overlay", at(tokens, vram_mb=size / 2**20)))
            assert found[f"{tokens:,} tokens, peak memory, GB"] == verdict
    found = verdicts(altered(runs, "overlay", at(4096, first_call_seconds=11.0)))
    assert found["slowest first call with empty caches, s"] == "missed"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("outputs/2/errors/y", 9e-3, "1,000,000 tokens, output against float64, relative RMS"),
        ("outputs/0/figures/cosine", 0.99, "1,000 tokens, output against float64, cosine"),
        ("outputs/1/figures/max_difference", 0.2, "65,536 tokens, output against float64, largest"),
        ("outputs/1/figures/reruns_equal", False, "lengths at which three calls differ in a bit"),
        ("gradients/0/errors/x", 0.9, "worst gradient (`x`)"),
        ("decoding/0/errors/apart", 0.1, "tokens decoded after"),
        ("exchange/0/errors/ours in public", 0.1, "public layer with our weights"),
        ("exchange/0/errors/public in ours", 0.1, "our layer with the public one's weights"),
        ("long runs/0/of/tokens", 1, "long sequences that did not run"),
        ("long runs/1/errors/slices", 0.1, "5,000,000 tokens in slices against one call"),
    ],
)
def test_a_figure_outside_of_its_limit_is_missed(
    runs: Runs, path: str, value: object, said: str
) -> None:
    name = "layer-accuracy"
    found = verdicts({**runs, name: changed(runs[name], path, value)})
    assert "missed" in [verdict for what, verdict in found.items() if said in what]


def test_every_launch_of_the_profile_has_a_step(profile: Run) -> None:
    found = find_steps(profile.entries, STEPS[str(profile.settings["tree"])])
    assert sum(step.launches for step in found) == len(profile.entries)
    busy = sum(launch.figures["ms"] for launch in profile.entries)
    assert sum(step.ms for step in found) == pytest.approx(busy)
    unknown = sum(step.ms for step in found if step.step is OTHER)
    assert unknown <= 0.03 * busy, [step.kernels for step in found if step.step is OTHER]
    assert profile_table(profile).count("\n") > len(found)


def test_products_go_to_the_steps_in_order() -> None:
    names = (SMALL, CUBLAS, "causal_conv_silu_kernel", SMALL, "gate_and_norm_kernel", CUBLAS)
    launches = [
        Entry(table="launches", of={"kernel": name}, figures={"ms": 2.0**i})
        for i, name in enumerate(names)
    ]
    found = {f.step.what: (f.launches, f.ms) for f in find_steps(launches, STEPS["overlay"])}
    assert found == {
        "projections of q, k, v and the gate": (1, 2),
        "convolution and SiLU": (1, 4),
        "gate widened, norm": (1, 16),
        "output projection": (1, 32),
        "other": (2, 9),
    }


def test_a_cast_s_floor_is_its_bytes_at_the_copy_s_bandwidth(profile: Run) -> None:
    cast = next(step for step in STEPS["overlay"] if step.what == "x to bf16")
    size = profile.number("tokens") * 512 * (4 + 2)
    bandwidth = profile.number("copy_gb_per_s") * 1e9
    assert cast.floor_ms(profile) == pytest.approx(size / bandwidth * 1e3)


def test_a_product_s_floor_is_the_longer_of_bytes_and_arithmetic(profile: Run) -> None:
    output = next(step for step in STEPS["overlay"] if step.what == "output projection")
    seconds = 2 * profile.number("tokens") * 512 * 512 / (profile.number("product_tflops") * 1e12)
    slow_copy = profile.adding(copy_gb_per_s=1.0)
    fast_copy = profile.adding(copy_gb_per_s=1e6)
    assert output.floor_ms(fast_copy) == pytest.approx(seconds * 1e3)
    size = 2 * profile.number("tokens") * 1024
    assert output.floor_ms(slow_copy) == pytest.approx(size / 1e9 * 1e3)


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        (SMALL, "small"),
        ("quasar_segment_map_bf16", "quasar_segment_map_bf16"),
        ("void at::native::f<8, at::native::g(at::T&)::{lambda(float)#1}>(int)", "f"),
        ("Memset (Device)", "Memset"),
    ],
)
def test_names_are_cut_to_the_kernel(kernel: str, short: str) -> None:
    assert short_name(kernel) == short


def test_launches_are_medians_in_order_of_start() -> None:
    calls = [
        [("b", at + 2.0, ms + 1), ("a", at, ms), ("a", at + 4.0, 9.0)]
        for at, ms in ((0.0, 3.0), (10.0, 1.0), (20.0, 2.0))
    ]
    found = [(x.of["kernel"], x.figures["ms"]) for x in launches_of(calls)]
    assert found == [("a", 2.0), ("b", 3.0), ("a", 9.0)]
    with pytest.raises(SystemExit, match="different kernels"):
        launches_of([calls[0], calls[1][:2]])


def test_the_share_of_the_bound_by_hand(runs: Runs) -> None:
    machine = runs["overlay"].environment
    assert machine is not None
    # 4,096 operations a clock in each of an H200's 132 multiprocessors, at 1,980 MHz; a token's
    # products: four of 512 x 512, two of 512 x 64, and three of 64 x 64 in 8 heads
    bound = 4096 * 132 * 1980e-6 / (2 * (4 * 512 * 512 + 2 * 512 * 64 + 3 * 8 * 64 * 64)) * 1e6
    assert bound_of(machine) == pytest.approx(bound * 1e6)
    speeds = {"overlay": {7: bound / 2, 9: bound}, "public-fork": {}, "baseline": {7: bound / 4}}
    text = shares_of_bound(machine, speeds)
    assert "| 7 | 50.0% | - | 66.7% |" in text  # 2 of 3 bounds are closed
    assert "| 9 | 100.0% | - | - |" in text
    silent = {"gpu": "NVIDIA X1", "memory_bus_bits": None, "compute_capability": None}
    unknown = machine.model_copy(update=silent)
    assert "not known" in shares_of_bound(unknown, speeds)


def test_every_figure_of_ours_stands_behind_a_check(runs: Runs) -> None:
    for name in ("overlay", "overlay-ops"):
        for entry in runs[name].table("processes"):
            assert not entry.failure
            assert entry.figures["checked_tokens"] in TREES[name].checks


def test_the_runs_cover_every_limit_on_one_machine(runs: Runs) -> None:
    measured = {name: set(by_length(runs[name])) for name in LABELS}
    assert measured["overlay"] == set(LENGTHS)
    assert set(SPEED) <= measured["overlay"]
    assert set(OPS_SPEED) <= measured["overlay-ops"]
    for name in LABELS:  # a length without a figure has a reason
        assert set(IN_README) <= {entry.of["tokens"] for entry in runs[name].entries}
        assert runs[name].environment == runs["overlay"].environment
    assert runs["overlay-ops"].commit == runs["overlay"].commit


@pytest.mark.parametrize("quantity", [SPEEDS, MEMORY, FIRST_CALL], ids=lambda q: q.plot)
def test_a_plot_has_a_point_for_every_length_of_every_tree(runs: Runs, quantity) -> None:
    root = ElementTree.fromstring(plot(runs, quantity))  # noqa: S314 made a line above
    labels = {e.text for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {label for label, _ in LABELS.values()} <= labels
    points = {
        (name, entry.of["tokens"])
        for name in LABELS
        for entry in runs[name].entries
        if not entry.failure and (quantity is not FIRST_CALL or entry.texts["cache"] == "cold")
    }
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == len(points)
