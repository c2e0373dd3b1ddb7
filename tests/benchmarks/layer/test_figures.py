"""The limits of the layer's figures, its profile by step, and the floors beside it."""

from __future__ import annotations

import pytest

from benchmarks.layer.limits import OPS_SPEED, PEAK_BYTES, QUIET_SPEED, SPEED
from benchmarks.layer.page import PROFILES, Runs, limits, load_runs
from benchmarks.layer.profile import launches_of
from benchmarks.layer.results import Launch, LayerProfile
from benchmarks.layer.tables.bound import bound_of, shares_of_bound
from benchmarks.layer.tables.steps import OTHER, STEPS, find_steps, profile_table, short_name
from benchmarks.results import DATA, load
from tests.benchmarks.runs import changed

SMALL = "void at::native::(anonymous namespace)::small<int>(int)"
CUBLAS = "nvjet_sm90_tst_256x128_64x4"


@pytest.fixture(scope="module", params=PROFILES)
def profile(request: pytest.FixtureRequest) -> LayerProfile:
    return load(LayerProfile, DATA / f"{request.param}.json")


@pytest.fixture(scope="module")
def runs() -> Runs:
    return load_runs()


def altered(runs: Runs, tree: str, length: int, **figures: float) -> Runs:
    """Return the runs with other figures at a length of one tree."""
    report = runs.reports[tree]
    measurements = tuple(
        m.model_copy(update=figures if m.length == length else {}) for m in report.measurements
    )
    other = report.model_copy(update={"measurements": measurements})
    return runs._replace(reports={**runs.reports, tree: other})


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
        found = verdicts(altered(runs, tree, tokens, tokens_per_sec=value * limit))
        assert found[f"{tokens:,} tokens, `{scope}` scope, M tokens/s"] == verdict


@pytest.mark.parametrize(("value", "verdict"), [(0.999, "missed"), (1.001, "met")])
def test_short_calls_are_judged_by_the_quietest_host(
    runs: Runs, value: float, verdict: str
) -> None:
    for tokens, limit in QUIET_SPEED.items():
        report = runs.reports["overlay"]
        slow, *others = report.by_length()[tokens]
        fast = slow.model_copy(update={"tokens_per_sec": value * limit})
        rest = [m for m in report.measurements if m.length != tokens]
        slower = [m.model_copy(update={"tokens_per_sec": 1e6}) for m in others]
        other = report.model_copy(update={"measurements": (*rest, *slower, fast)})
        found = verdicts(runs._replace(reports={**runs.reports, "overlay": other}))
        assert found[f"{tokens:,} tokens, `layer` scope, fastest process, M tokens/s"] == verdict


def test_memory_and_first_calls_are_judged(runs: Runs) -> None:
    for tokens, most in PEAK_BYTES.items():
        for size, verdict in ((1.001 * most, "missed"), (0.999 * most, "met")):
            found = verdicts(altered(runs, "overlay", tokens, vram_mb=size / 2**20))
            assert found[f"{tokens:,} tokens, peak memory, GB"] == verdict
    found = verdicts(altered(runs, "overlay", 4096, first_call_seconds=11.0))
    assert found["slowest first call with empty caches, s"] == "missed"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("outputs.2.relative_rms", 9e-3, "1,000,000 tokens, output against float64, relative RMS"),
        ("outputs.0.cosine", 0.99, "1,000 tokens, output against float64, cosine"),
        ("outputs.1.max_difference", 0.2, "65,536 tokens, output against float64, largest"),
        ("outputs.1.reruns_equal", False, "lengths at which three calls differ in a bit"),
        ("gradients.0.errors.x", 0.9, "worst gradient (`x`)"),
        ("decoding.apart", 0.1, "tokens decoded after"),
        ("exchange.ours_in_public", 0.1, "public layer with our weights"),
        ("exchange.public_in_ours", 0.1, "our layer with the public one's weights"),
        ("long_runs", [], "long sequences that did not run"),
        ("long_runs.1.slices_apart", 0.1, "5,000,000 tokens in slices against one call"),
    ],
)
def test_a_figure_outside_of_its_limit_is_missed(
    runs: Runs, path: str, value: object, said: str
) -> None:
    found = verdicts(runs._replace(accuracy=changed(runs.accuracy, path, value)))
    assert "missed" in [verdict for what, verdict in found.items() if said in what]


def test_every_launch_of_the_profile_has_a_step(profile: LayerProfile) -> None:
    found = find_steps(profile.launches, STEPS[profile.tree])
    assert sum(step.launches for step in found) == len(profile.launches)
    busy = sum(launch.ms for launch in profile.launches)
    assert sum(step.ms for step in found) == pytest.approx(busy)
    unknown = sum(step.ms for step in found if step.step is OTHER)
    assert unknown <= 0.03 * busy, [step.kernels for step in found if step.step is OTHER]
    assert profile_table(profile).count("\n") > len(found)


def test_products_go_to_the_steps_in_order() -> None:
    names = (SMALL, CUBLAS, "causal_conv_silu_kernel", SMALL, "gate_and_norm_kernel", CUBLAS)
    launches = [Launch(kernel=name, ms=2.0**i) for i, name in enumerate(names)]
    found = {f.step.what: (f.launches, f.ms) for f in find_steps(launches, STEPS["overlay"])}
    assert found == {
        "projections of q, k, v and the gate": (1, 2),
        "convolution and SiLU": (1, 4),
        "gate widened, norm": (1, 16),
        "output projection": (1, 32),
        "other": (2, 9),
    }


def test_a_cast_s_floor_is_its_bytes_at_the_copy_s_bandwidth(profile: LayerProfile) -> None:
    cast = next(step for step in STEPS["overlay"] if step.what == "x to bf16")
    size = profile.tokens * 512 * (4 + 2)
    assert cast.floor_ms(profile) == pytest.approx(size / (profile.copy_gb_per_s * 1e9) * 1e3)


def test_a_product_s_floor_is_the_longer_of_bytes_and_arithmetic(profile: LayerProfile) -> None:
    output = next(step for step in STEPS["overlay"] if step.what == "output projection")
    seconds = 2 * profile.tokens * 512 * 512 / (profile.product_tflops * 1e12)
    slow_copy = profile.model_copy(update={"copy_gb_per_s": 1.0})
    fast_copy = profile.model_copy(update={"copy_gb_per_s": 1e6})
    assert output.floor_ms(fast_copy) == pytest.approx(seconds * 1e3)
    assert output.floor_ms(slow_copy) == pytest.approx(2 * profile.tokens * 1024 / 1e9 * 1e3)


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
    assert [(x.kernel, x.ms) for x in launches_of(calls)] == [("a", 2.0), ("b", 3.0), ("a", 9.0)]
    with pytest.raises(SystemExit, match="different kernels"):
        launches_of([calls[0], calls[1][:2]])


def test_the_share_of_the_bound_by_hand(runs: Runs) -> None:
    machine = runs.reports["overlay"].environment
    assert machine is not None
    # 4,096 operations a clock in each of an H200's 132 multiprocessors, at 1,980 MHz; a token's
    # products: four of 512 x 512, two of 512 x 64, and three of 64 x 64 in 8 heads
    bound = 4096 * 132 * 1980e-6 / (2 * (4 * 512 * 512 + 2 * 512 * 64 + 3 * 8 * 64 * 64)) * 1e6
    assert bound_of(machine) == pytest.approx(bound * 1e6)
    speeds = {"overlay": {7: bound / 2, 9: bound}, "public-fork": {}, "peer": {7: bound / 4}}
    text = shares_of_bound(machine, speeds)
    assert "| 7 | 50.0% | - | 66.7% |" in text  # 1 of the 3 bounds that the peer is late is left
    assert "| 9 | 100.0% | - | - |" in text
    silent = {"gpu": "NVIDIA X1", "memory_bus_bits": None, "compute_capability": None}
    unknown = machine.model_copy(update=silent)
    assert "not known" in shares_of_bound(unknown, speeds)
