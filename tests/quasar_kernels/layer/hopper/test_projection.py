"""The grids of Hopper's fused stages, and calls that they do not support."""

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar.chunk_torch import chunk_quasar_torch
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.program import LoadedProgram, Variant
from fla.ops.quasar.layer import hopper, library, paths
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.forward import layer_forward
from fla.ops.quasar.layer.wrapped import plain_weights
from fla.ops.quasar.operator_types import Saved, Scan


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


LAYER = {"hidden_size": 512, "head_dim": 64, "num_heads": 8}
CALL = Call(8, 64, 1e-5, torch.bfloat16, None, "auto")
FAILED = "cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED"


class Machine:
    """A GPU whose driver refuses some launches; library products take the place of its kernels."""

    def __init__(self, monkeypatch, refused):
        self.refused, self.ran = refused, []
        variant, entries = Variant(0, torch.bfloat16), {}
        entries[variant] = LoadedProgram(variant, {}, 132, True)
        monkeypatch.setattr(hopper.PROGRAM, "_entries", entries)
        monkeypatch.setattr(hopper, "find_program", lambda *_: hopper.PROGRAM.find_loaded(variant))
        monkeypatch.setattr(paths, "supports_kernels", lambda *_: True)
        monkeypatch.setattr(paths, "fits_512", lambda *_: True)
        monkeypatch.setattr(paths, "portable_is_faster", lambda *_: False)
        self.project, self.output = library.project, library.output
        monkeypatch.setattr(hopper, "project", self.launch("project"))
        monkeypatch.setattr(hopper, "output", self.launch("output"))

    def launch(self, stage):
        def run(program, *args):
            self.ran.append(stage)
            if stage == self.refused:
                raise CudaUnavailableError(FAILED, "start again")
            return getattr(self, stage)(program, *args)

        return run


class Rank:
    """A rank's slice, whose exchange happens once for each call."""

    def __init__(self, operator):
        self.operator, self.exchanges = operator, 0

    def replace_first_tokens(self, *args):
        pass

    def forward(self, inputs, backend, save):
        self.exchanges += 1
        return self.operator(inputs, backend=backend)


@pytest.mark.parametrize("stage", ["project", "output"])
def test_after_a_failed_launch_the_library_continues_without_another_exchange(
    monkeypatch, caplog, stage
):
    def by_torch(inputs, backend):
        o, _ = chunk_quasar_torch(*inputs[:3], inputs.steps.values)
        return Scan(o, None, Saved(inputs, None, None, None))

    monkeypatch.setattr("fla.ops.quasar.layer.forward.scan_forward", by_torch)
    weights, x = plain_weights(QuasarAttention(**LAYER)), torch.randn(1, 8, 512)
    with torch.no_grad():
        Machine(monkeypatch, refused=None)
        wanted = layer_forward(CALL, x, weights).y
        machine, rank = Machine(monkeypatch, stage), Rank(by_torch)
        found = [layer_forward(CALL, x, weights, rank=rank).y for _ in range(2)]
        assert all(torch.equal(y, wanted) for y in found)
        assert rank.exchanges == 2
        assert machine.ran == {"project": ["project"], "output": ["project", "output"]}[stage]
        (record,) = caplog.records
        line = f"the layer's fused products are not used: {FAILED}; remedy: start again"
        assert record.getMessage() == line
        assert hopper.PROGRAM.find(Variant(0, torch.bfloat16)).remedy == "start again"
        Machine(monkeypatch, stage)
        with pytest.raises(CudaUnavailableError, match="LAUNCH_FAILED"):
            layer_forward(CALL._replace(backend="cuda"), x, weights)
