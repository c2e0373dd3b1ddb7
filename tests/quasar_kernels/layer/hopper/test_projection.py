"""How the fused projection cuts a sequence into runs, and where the layer does without it."""

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
from fla.ops.quasar.layer.hopper import gated_output, projection, stages
from fla.ops.quasar.layer.hopper.program import PROGRAM, hopper_program


@pytest.mark.parametrize("runs", [2, 132])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 64, 65, 253, 16_503, 16_504, 100_000, 1_000_000])
def test_runs_hold_every_token_once_and_no_step_too_many(tokens, runs):
    def written(steps):
        owned = torch.zeros(tokens, dtype=torch.int)
        for run in range(runs):
            first = run * (128 * steps - 3)
            owned[first + 3 * (run > 0) : first + 128 * steps] += 1
        return owned

    steps = projection._steps(tokens, runs)
    assert (written(steps) == 1).all()
    assert steps == 1 or (written(steps - 1) == 0).any()


@pytest.mark.parametrize("multiprocessors", [2, 78, 132])
@pytest.mark.parametrize("tokens", [1, 3, 4, 512, 2048, 4099, 16_384, 65_536, 100_000, 1_000_000])
def test_the_grid_computes_every_product_of_every_token(tokens, multiprocessors):
    blocks, rows, steps, lag = projection._grid(tokens, multiprocessors)
    assert blocks % 2 == 0
    assert 1 <= rows <= 13
    assert 2 <= blocks * rows <= multiprocessors  # all at once
    assert (blocks - 1) * (128 * steps - 3) + 128 * steps >= tokens
    assert lag < 13 // rows
    if tokens >= 1_000_000:
        assert rows == 1  # x is read once


@pytest.mark.parametrize("multiprocessors", [2, 78, 132])
@pytest.mark.parametrize("tiles", [1, 8, 64, 256, 1563, 15_625])
def test_the_grid_computes_every_output_of_every_token(tiles, multiprocessors):
    blocks, rows, steps = gated_output._grid(tiles, 4, multiprocessors)
    assert blocks % 2 == 0
    assert 4 % rows == 0
    assert 2 <= blocks * rows <= multiprocessors
    assert 2 * blocks * steps >= tiles
    if tiles == 15_625:
        assert rows == 1  # every token is normed once


def project(layer, x, kernels=stages.KERNELS):
    """The layer's first stage for x on Hopper."""
    call = Call(8, 64, 1e-5, torch.bfloat16, None, "auto")
    return kernels.stages().project(call, x, layer._weights(), False, True)


def test_no_other_device_takes_it():
    layer = QuasarAttention(hidden_size=512, head_dim=64, num_heads=8)
    x = torch.randn(1, 8, 512)
    assert hopper_program(x, torch.bfloat16) is None
    with torch.no_grad():
        assert project(layer, x) is None


def test_kernels_whose_launch_fails_are_used_no_more(monkeypatch, caplog):
    layer = QuasarAttention(hidden_size=512, head_dim=64, num_heads=8)
    x = torch.randn(1, 8, 512)
    variant = Variant(0, torch.bfloat16)

    def refuse(*_):
        raise CudaUnavailableError("cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED", "start again")

    monkeypatch.setattr(fused, "takes", lambda *_: True)
    monkeypatch.setattr(PROGRAM, "_entries", {})
    kernels = {"pack_weights": SimpleNamespace(threads=256, launch=refuse)}
    found = LoadedProgram(variant, kernels, 132, True)
    monkeypatch.setattr(torch_private, "raw_stream", lambda _: 0)
    assert project(layer, x, stages.KERNELS._replace(find=lambda *_: found)) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "the layer's fused products are not used: cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED; "
        "remedy: start again"
    )
    assert PROGRAM.find(variant).remedy == "start again"
