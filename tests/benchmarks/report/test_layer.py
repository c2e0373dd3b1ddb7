"""The layer's document: its profile by step, the floors and the bound."""

from __future__ import annotations

import pytest

from benchmarks.cases.layer_profile import launches_of
from benchmarks.engine.results import DATA, Entry, Run, load
from benchmarks.report.layer import TREES, Runs, bound_of, lengths, load_runs
from benchmarks.report.layer_steps import OTHER, STEPS, find_steps, profile_table

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
    size = 2 * profile.number("tokens") * 1024
    for gb_per_s, floor in ((1e6, seconds), (1.0, size / 1e9)):
        copies = profile.adding(copy_gb_per_s=gb_per_s)
        assert output.floor_ms(copies) == pytest.approx(floor * 1e3)


def test_launches_are_medians_in_order_of_start() -> None:
    calls = [
        [("b", at + 2.0, ms + 1), ("a", at, ms), ("a", at + 4.0, 9.0)]
        for at, ms in ((0.0, 3.0), (10.0, 1.0), (20.0, 2.0))
    ]
    found = [(x.of["kernel"], x.figures["ms"]) for x in launches_of(calls)]
    assert found == [("a", 2.0), ("b", 3.0), ("a", 9.0)]
    with pytest.raises(SystemExit, match="different kernels"):
        launches_of([calls[0], calls[1][:2]])


def test_the_bound_by_hand(runs: Runs) -> None:
    machine = runs["overlay"].environment
    assert machine is not None
    # 4,096 operations a clock in each of an H200's 132 multiprocessors, at 1,980 MHz; a token's
    # products: four of 512 x 512, two of 512 x 64, and three of 64 x 64 in 8 heads
    bound = 4096 * 132 * 1980e-6 / (2 * (4 * 512 * 512 + 2 * 512 * 64 + 3 * 8 * 64 * 64)) * 1e6
    assert bound_of(machine) == pytest.approx(bound * 1e6)
    silent = {"gpu": "NVIDIA X1", "memory_bus_bits": None, "compute_capability": None}
    assert bound_of(machine.model_copy(update=silent)) is None


def test_the_closed_share_of_the_gap_to_the_bound(runs: Runs) -> None:
    first = lengths(runs)[0]
    ours, fork = first["overlay"]["speed"], first["public-fork"]["speed"]
    closed = lengths(runs, 400.0)[0]["closed"]["public-fork"]
    assert closed == pytest.approx((1 / fork - 1 / ours) / (1 / fork - 1 / 400))
    assert "closed" not in first


def test_the_trees_were_measured_on_one_machine(runs: Runs) -> None:
    # the GPUs may be several of the machine's
    some_gpu: dict[str, object] = {"gpu_uuid": None, "variables": {}}
    found = [environment for name in TREES if (environment := runs[name].environment)]
    machines = [environment.model_copy(update=some_gpu) for environment in found]
    assert machines == machines[:1] * len(TREES)
