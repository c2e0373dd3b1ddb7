"""The portable fused kernels on a GPU against float64, and a layer that uses them."""

from __future__ import annotations

import json

import pytest
import torch
from fla.ops.quasar.layer import hopper, portable, timed_choice, wide
from fla.ops.quasar.triton_kernels.autotune import GAIN

from quasar_kernels.reference import relative_rms
from tests.gpu.calls import ON_CUDA_KERNELS
from tests.gpu.layer.fused_stages import GatedOutput, Projection
from tests.gpu.layer.layers import call, make_layer

pytestmark = ON_CUDA_KERNELS


TWO_GROUPS = ("-DQUASAR_GROUPS=2",)  # of warps in a block, as on GPUs with 99 KB of shared memory


class TestProjection(Projection):
    kernels = portable


class TestProjectionOfTwoGroups(TestProjection):
    options = TWO_GROUPS


class TestGatedOutput(GatedOutput):
    kernels = portable


class TestGatedOutputOfTwoGroups(TestGatedOutput):
    options = TWO_GROUPS


@pytest.fixture
def no_hopper(monkeypatch):
    """Do not use the kernels for Hopper GPUs."""
    for kernels in (hopper, wide):
        monkeypatch.setattr(kernels, "find_program", lambda x, dtype: None)


@pytest.mark.usefixtures("no_hopper")
@pytest.mark.parametrize("tokens", [700, 16_384, 40_077])
def test_the_layer_agrees_with_the_library_path(monkeypatch, tokens):
    """Compare forward and backward passes; on Hopper, the portable kernels replace its own."""
    dy = torch.randn(1, tokens, 512, device="cuda")
    results = []
    for backend in ("cuda", "triton"):
        monkeypatch.setenv("QUASAR_BACKEND", backend)
        layer = make_layer()  # sets the seed
        x = torch.randn(1, tokens, 512, device="cuda", requires_grad=True)
        y = call(layer, x)
        y.backward(dy.to(y.dtype))
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        results.append({"y": y.detach(), "x": x.grad, **gradients})
    found, wanted = results
    errors = {name: relative_rms(found[name], wanted[name]) for name in wanted}
    # the terms of beta_log's gradient cancel
    limits = {name: 6e-2 if name == "beta_log" else 2e-2 for name in errors}
    assert not {name: error for name, error in errors.items() if error > limits[name]}


@pytest.mark.usefixtures("no_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_uses_the_stages_that_were_faster(monkeypatch, tmp_path, dtype):
    """As on a GPU without Hopper's instructions, which this one may have."""
    monkeypatch.setattr(timed_choice, "is_hopper", lambda x: False)
    monkeypatch.setattr(timed_choice, "_chosen", {})
    monkeypatch.setenv("QUASAR_CACHE_DIR", str(tmp_path))
    layer = make_layer()
    x = torch.randn(1, 20_000, 512, device="cuda")

    def run(backend):
        monkeypatch.setenv("QUASAR_BACKEND", backend)
        with torch.no_grad(), torch.autocast("cuda", dtype):
            return layer(x)[0]

    y = run("auto")
    (kept,) = tmp_path.glob("layer-*.json")
    times = json.loads(kept.read_text())
    fused, library = times["fused_ms"], times["library_ms"]
    assert 0.01 < fused < 100, times
    assert 0.01 < library < 100, times
    expected = {True: run("cuda")}
    monkeypatch.setattr(timed_choice, "_chosen", {})
    monkeypatch.setenv("QUASAR_AUTOTUNE", "0")
    expected[False] = run("auto")
    assert not torch.equal(expected[True], expected[False])
    assert torch.equal(y, expected[fused < GAIN * library])
