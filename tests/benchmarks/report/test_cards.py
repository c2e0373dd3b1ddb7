"""Estimated speeds and calculated peak memory agree with measurements; contributed runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.engine.results import load, write
from benchmarks.report import cards
from benchmarks.report.estimates import LONG_TOKENS, SPEEDS, Estimates
from harness.hardware.gpus import GPUS, Gpu, published_bound
from quasar_kernels.mount import mount

mount()

from fla.ops.quasar.layer import paths  # noqa: E402


@pytest.fixture(scope="module")
def estimates() -> Estimates:
    return Estimates.load()


def test_the_method_predicts_measured_speeds_within_a_tenth(estimates: Estimates) -> None:
    long = [one for one in cards.compared(estimates) if one.tokens >= cards.LONG]
    assert {one.tokens for one in long if one.path is estimates.hopper} >= {
        100_000,
        262_144,
        1_000_000,
    }
    assert {one.path.name for one in long} == {one.name for one in estimates}
    for path, gpu, tokens, measured in long:
        assert path.speed(tokens, gpu) == pytest.approx(measured, rel=0.1), (path.name, tokens)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.label)
def test_no_estimate_exceeds_the_card_s_bound(estimates: Estimates, gpu: Gpu) -> None:
    speeds = [estimates.speed(n, gpu) for n in cards.SHOWN]
    assert speeds == sorted(speeds)
    assert speeds[-1] < published_bound(gpu)


@pytest.mark.parametrize("gpu", [g for g in GPUS if not g.hopper], ids=lambda gpu: gpu.label)
def test_the_layer_chooses_the_path_with_the_higher_estimate(estimates, monkeypatch, gpu):
    capability = tuple(map(int, gpu.capability.split(".")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    fused, library = (p.speed(LONG_TOKENS, gpu) for p in (estimates.fused, estimates.portable))
    chosen = paths.portable_is_faster(SimpleNamespace(device=torch.device("cuda", 0)))
    assert chosen == (fused > library), (fused, library)
    assert estimates.path(gpu) is (estimates.fused if chosen else estimates.portable)


@pytest.mark.parametrize(("path", "file", "capability"), cards.PEAKS)
def test_the_calculated_memory_is_near_the_measured_peaks(path, file, capability):
    peaks = cards.long_peaks(load(file))
    shares = [cards.counted_bytes(one, capability) / one.figures["peak_bytes"] for one in peaks]
    assert len(shares) >= 8
    assert all(0.98 <= one <= 1.12 for one in shares), shares


def test_a_contributed_run_is_listed_and_an_unchecked_one_refused(tmp_path, monkeypatch, estimates):
    monkeypatch.setattr(cards, "CARDS", tmp_path)
    run = load(SPEEDS)
    write(tmp_path / "mine.json", run)
    (one,) = cards.contributed()
    assert cards.measured_run(one, estimates)["of_estimate"] == pytest.approx(1, rel=0.1)
    unchecked = [e.model_copy(update={"figures": {"tokens_per_sec": 1.0}}) for e in run.entries]
    write(tmp_path / "mine.json", run.model_copy(update={"entries": tuple(unchecked)}))
    with pytest.raises(SystemExit, match=r"mine\.json must be written by"):
        cards.contributed()
