"""The fused projection on a Hopper GPU against float64, and the layer after its failure."""

import logging

import torch
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.layer import hopper
from fla.ops.quasar.layer.paths import MIN_TOKENS

from tests.gpu.calls import ON_HOPPER
from tests.gpu.layer.fused_stages import Projection
from tests.gpu.layer.layers import call

pytestmark = ON_HOPPER


class TestProjection(Projection):
    kernels = hopper


def test_after_a_failure_the_library_path_runs_and_one_line_is_logged(layer, monkeypatch, caplog):
    def fail(*_):
        raise CudaUnavailableError("no such luck", "try again")

    monkeypatch.setattr(hopper.PROGRAM, "compile", fail)
    monkeypatch.setattr(hopper.PROGRAM, "_entries", {})
    x = torch.randn(1, MIN_TOKENS, 512, device="cuda")
    with caplog.at_level(logging.WARNING, "fla.ops.quasar"), torch.no_grad():
        first, second = call(layer, x), call(layer, x)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert [record.getMessage() for record in caplog.records] == [
        "the layer's fused products are not used: no such luck; remedy: try again"
    ]
