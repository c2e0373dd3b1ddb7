"""The fused projection on a Hopper GPU against float64, and when the layer uses it."""

from __future__ import annotations

import logging

import torch
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.layer import forward as layer_forward
from fla.ops.quasar.layer.fused import FEWEST_TOKENS
from fla.ops.quasar.layer.hopper.program import KERNELS, PROGRAM

from quasar_kernels.reference import relative_rms
from tests.gpu.calls import ON_HOPPER
from tests.gpu.layer.fused_stages import Projection

pytestmark = ON_HOPPER


class TestProjection(Projection):
    kernels = KERNELS


def forward(layer, x):
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        return layer(x)[0]


def test_the_layer_uses_it_for_long_calls_and_agrees_with_the_library_path(layer, monkeypatch):
    lengths = []

    def recorded(program, x, *rest):
        lengths.append(x.shape[0])
        return KERNELS.project(program, x, *rest)

    monkeypatch.setattr(layer_forward, "HOPPER", KERNELS._replace(project=recorded).stages())
    x = torch.randn(1, 40_077, 512, device="cuda")
    fused = forward(layer, x)
    forward(layer, x[:, : FEWEST_TOKENS - 1])
    forward(layer, x.expand(2, -1, -1))
    monkeypatch.setenv("QUASAR_BACKEND", "triton")
    plain = forward(layer, x)
    assert lengths == [x.shape[1]]
    assert relative_rms(fused, plain) <= 1.2e-2


def test_after_a_failure_the_library_path_runs_and_one_line_is_logged(layer, monkeypatch, caplog):
    def fail(*_):
        raise CudaUnavailableError("no such luck", "try again")

    monkeypatch.setattr(PROGRAM, "compile", fail)
    monkeypatch.setattr(PROGRAM, "_entries", {})
    x = torch.randn(1, FEWEST_TOKENS, 512, device="cuda")
    with caplog.at_level(logging.WARNING, "fla.ops.quasar"):
        first, second = forward(layer, x), forward(layer, x)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert [record.getMessage() for record in caplog.records] == [
        "the layer's fused products are not used: no such luck; remedy: try again"
    ]
