"""The portable fused kernels on a GPU against float64, and a layer that uses them."""

import pytest
import torch
from fla.ops.quasar.layer import hopper, paths, portable, wide

from quasar_kernels.reference import relative_rms
from tests.gpu.calls import ON_CUDA_KERNELS
from tests.gpu.layer.fused_stages import GatedOutput, Projection
from tests.gpu.layer.layers import make_layer
from tests.quasar_kernels.layer.steps import step

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
        monkeypatch.setattr(kernels, "find_program", lambda *arguments: None)


@pytest.mark.usefixtures("no_hopper")
@pytest.mark.parametrize("tokens", [700, 16_384, 40_077])
def test_the_layer_agrees_with_the_library_path(monkeypatch, tokens):
    """Compare forward and backward passes; on Hopper, the portable kernels replace its own."""
    dy = torch.randn(1, tokens, 512, device="cuda")
    results = []
    for backend in ("cuda", "triton"):
        monkeypatch.setenv("QUASAR_BACKEND", backend)
        layer = make_layer()  # sets the seed
        x = torch.randn(1, tokens, 512, device="cuda")
        results.append(step(layer, x, dy, torch.bfloat16))
    found, wanted = results
    errors = {name: relative_rms(found[name], wanted[name]) for name in wanted}
    # the terms of beta_log's gradient cancel
    limits = {name: 6e-2 if name == "beta_log" else 2e-2 for name in errors}
    assert not {name: error for name, error in errors.items() if error > limits[name]}


@pytest.mark.usefixtures("no_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_uses_the_kernels_on_gpus_whose_products_are_mma_sync(monkeypatch, dtype):
    layer = make_layer()
    x = torch.randn(1, 20_000, 512, device="cuda")

    def run(backend):
        monkeypatch.setenv("QUASAR_BACKEND", backend)
        with torch.no_grad(), torch.autocast("cuda", dtype):
            return layer(x)[0]

    fused = run("cuda")
    monkeypatch.setattr(paths, "MMA_SYNC", (torch.cuda.get_device_capability()[0],))
    assert torch.equal(run("auto"), fused)
    monkeypatch.setattr(paths, "MMA_SYNC", ())
    assert not torch.equal(run("auto"), fused)
