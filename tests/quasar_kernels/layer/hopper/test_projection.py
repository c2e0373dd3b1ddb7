"""The grids of Hopper's fused stages, and calls that they do not support."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.program import LoadedProgram, Variant
from fla.ops.quasar.layer import fused
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.hopper import program as hopper
from fla.ops.quasar.layer.hopper.program import KERNELS, PROGRAM


@pytest.mark.parametrize("multiprocessors", [2, 78, 132])
@pytest.mark.parametrize("tokens", [1, 3, 4, 512, 4099, 16_384, 100_000, 1_000_000])
def test_the_grid_computes_every_product_of_every_token(tokens, multiprocessors):
    blocks, rows, steps, lag = hopper.projection_grid(tokens, multiprocessors)
    assert blocks % 2 == 0
    assert 1 <= rows <= 13
    assert 2 <= blocks * rows <= multiprocessors  # all blocks run at the same time
    assert (blocks - 1) * (128 * steps - 3) + 128 * steps >= tokens
    assert lag < 13 // rows
    if tokens >= 1_000_000:
        assert rows == 1  # x is read once


@pytest.mark.parametrize("multiprocessors", [2, 78, 132])
@pytest.mark.parametrize("tiles", [1, 8, 64, 1563, 15_625])
def test_the_grid_computes_every_output_of_every_token(tiles, multiprocessors):
    blocks, rows, steps = hopper.output_grid(tiles, 4, multiprocessors)
    assert blocks % 2 == 0
    assert 4 % rows == 0
    assert 2 <= blocks * rows <= multiprocessors
    assert 2 * blocks * steps >= tiles
    if tiles == 15_625:
        assert rows == 1  # each token is normed once


def project(x, kernels=KERNELS):
    """Run the first stage of a layer for x."""
    layer = QuasarAttention(hidden_size=512, head_dim=64, num_heads=8)
    call = Call(8, 64, 1e-5, torch.bfloat16, None, "auto")
    return kernels.stages().project(call, x, layer._weights(), False, True)


def test_cpu_tensors_are_not_supported():
    with torch.no_grad():
        assert project(torch.randn(1, 512, 512)) is None


def test_kernels_are_not_used_again_after_a_failed_launch(monkeypatch, caplog):
    variant = Variant(0, torch.bfloat16)

    def refuse(*_):
        raise CudaUnavailableError("cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED", "start again")

    monkeypatch.setattr(fused, "takes", lambda *_: True)
    monkeypatch.setattr(PROGRAM, "_entries", {})
    kernels = {"pack_weights": SimpleNamespace(threads=256, launch=refuse)}
    program = LoadedProgram(variant, kernels, 132, True)
    monkeypatch.setattr(torch_private, "raw_stream", lambda _: 0)
    kernels = KERNELS._replace(find=lambda *_: program)
    assert project(torch.randn(1, 8, 512), kernels) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "the layer's fused products are not used: cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED; "
        "remedy: start again"
    )
    assert PROGRAM.find(variant).remedy == "start again"
