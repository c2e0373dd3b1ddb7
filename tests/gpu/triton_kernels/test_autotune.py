"""Autotuning on a GPU with a hidden name: its result, and no second search."""

from __future__ import annotations

import pytest
import torch
from fla.ops.quasar.operator_types import ScanInputs
from fla.ops.quasar.triton_kernels import autotune, passes, tuning
from fla.ops.quasar.triton_kernels.autotune import Gpu

from quasar_kernels.reference import quasar_chunked, relative_rms
from tests.quasar_kernels.tolerances import OPERATOR

pytestmark = pytest.mark.gpu


def forward(tiles, q, k, v, beta):
    return passes.forward(ScanInputs.of(q, k, v, beta), plan=passes.plan_segments(q, None, tiles)).o


@pytest.fixture(autouse=True)
def cold(monkeypatch, tmp_path):
    """Empty caches, no tuned tiles, and a GPU name that is not in tuned.json."""
    known = Gpu.of(torch.device("cuda", 0))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("QUASAR_CACHE_DIR", str(tmp_path / "quasar"))
    monkeypatch.delenv("QUASAR_AUTOTUNE", raising=False)
    monkeypatch.setattr(tuning, "_chosen", {})
    unknown = known._replace(name="a GPU of next year")
    monkeypatch.setattr(Gpu, "of", classmethod(lambda cls, device: unknown))


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 32)]
)
def test_autotuning_stores_correct_tiles(monkeypatch, dtype, width):
    device = torch.device("cuda", torch.cuda.current_device())
    q, k, v = (torch.randn(1, 4000, 8, width, device=device, dtype=dtype) / 4 for _ in range(3))
    beta = torch.linspace(1, 16, 8, device=device)
    before = torch.cuda.get_rng_state()
    tiles = tuning.tiles_for(width, dtype, device, forward)
    assert torch.equal(before, torch.cuda.get_rng_state())
    o, oracle = forward(tiles, q, k, v, beta), quasar_chunked(q, k, v, beta)[0]
    assert relative_rms(o, oracle) <= OPERATOR[dtype]

    def not_again(*arguments):
        raise AssertionError("tuned a second time")

    monkeypatch.setattr(autotune, "tune", not_again)
    monkeypatch.setattr(tuning, "_chosen", {})  # as in a new process
    assert tuning.tiles_for(width, dtype, device, forward) == tiles


def test_nothing_is_tuned_while_a_graph_is_captured(monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    width, dtype = 64, torch.bfloat16
    default = tuning.safe_tiles(width, dtype, Gpu.of(device).capability)
    q, k, v = (torch.randn(1, 500, 8, width, device=device, dtype=dtype) for _ in range(3))
    beta = torch.ones(8, device=device)
    expected = forward(default, q, k, v, beta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiles = tuning.tiles_for(width, dtype, device, forward)
        o = forward(tiles, q, k, v, beta)
    graph.replay()
    assert tiles == default
    assert torch.equal(o, expected)
    assert not tuning._chosen
