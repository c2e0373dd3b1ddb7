"""Which implementation runs a call of the layer: the table's rows in docs/layer-calls.md."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from fla.layers.quasar import QuasarCache
from fla.ops.quasar.layer import autograd, hopper, library, portable, wide

from tests.gpu.calls import CAPABILITY
from tests.gpu.layer.layers import backward_graphs, graphs, make_layer

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


class Path(NamedTuple):
    """The implementation of a recorded call and of its backward pass."""

    forward: str  # the implementation without replay: fused, wide, kernels or steps
    forward_graph: bool  # whether the forward pass is replayed
    kept: bool  # whether results are stored
    backward_graph: bool  # whether the backward pass is replayed


@pytest.fixture
def seen(monkeypatch):
    """The implementations that ran, in order."""
    ways = []

    def spy(owner, name, describe):
        original = getattr(owner, name)

        def run(*args, **kwargs):
            found = original(*args, **kwargs)
            ways.append(describe(found))
            return found

        monkeypatch.setattr(owner, name, run)

    names = {hopper: "fused", wide: "wide", portable: "fused", library: "kernels"}
    for kernels, way in names.items():
        spy(kernels, "project", lambda _, way=way: way)
    spy(library, "layer_with_states", lambda _: "steps")
    spy(autograd, "saves_results", lambda saved: saved)
    monkeypatch.delenv("QUASAR_KEEP_MIB", raising=False)
    return ways


def path(seen, layer, shape, dtype, **kwargs):
    x = torch.randn(*shape, layer.hidden_size, device="cuda", requires_grad=True)
    dy, first = torch.randn_like(x).to(dtype), None
    for _ in range(10):
        x.grad = None
        layer.zero_grad()
        seen.clear()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            y = layer(x, **kwargs)[0]
        first = first or list(seen)
        y.backward(dy)
        del y  # so that the next call gets the same addresses
    ways = [way for way in first if isinstance(way, str)]
    kept = [way for way in first if isinstance(way, bool)]
    backward = bool(backward_graphs(layer))
    forward = len(graphs(layer)) > len(backward_graphs(layer))
    return Path(ways[0], forward, kept[0], backward)


HOPPER = "fused" if CAPABILITY == (9, 0) else "kernels"
WIDE = "wide" if CAPABILITY == (9, 0) else "kernels"
CUDA = "fused" if CAPABILITY and CAPABILITY >= (8, 0) else "kernels"
BOUNDS = torch.tensor([0, 100, 300])
LONG_BOUNDS = torch.tensor([0, 100, 30_000, 40_000])
MASK = torch.ones(2, 300)
MASK[0, :100] = 0


@pytest.mark.parametrize(
    ("arguments", "shape", "dtype", "expected"),
    [
        ({}, (1, 511), BF16, Path("kernels", True, False, True)),
        ({}, (1, 512), BF16, Path(HOPPER, True, False, True)),
        ({}, (4, 4096), torch.float16, Path(HOPPER, True, False, True)),
        ({}, (9, 500), BF16, Path("kernels", True, False, True)),
        ({}, (1, 20_000), BF16, Path(HOPPER, False, True, True)),
        ({}, (1, 40_000), BF16, Path(HOPPER, False, True, True)),
        ({}, (10, 4000), BF16, Path(HOPPER, False, True, True)),
        ({}, (80, 500), BF16, Path("kernels", False, True, True)),
        ({}, (1, 70_000), BF16, Path(HOPPER, False, True, False)),
        ({}, (1, 400_000), BF16, Path(HOPPER, False, False, False)),
        ({}, (1, 512), torch.float32, Path("kernels", False, True, False)),
        ({"head_dim": 256, "num_heads": 2}, (1, 512), BF16, Path("steps", True, False, False)),
        ({"conv_size": 3}, (1, 512), BF16, Path("steps", True, False, False)),
        ({"use_short_conv": False}, (1, 512), BF16, Path("steps", True, False, False)),
        ({"mode": "fused_recurrent"}, (1, 64), BF16, Path("steps", True, False, False)),
        (
            {"hidden_size": 2048, "num_heads": 16, "head_dim": 128},
            (2, 4096),
            BF16,
            Path(WIDE, False, True, False),
        ),
        ({"head_dim": 128, "num_heads": 4}, (1, 1024), BF16, Path("kernels", True, False, True)),
        ({"head_dim": 128, "num_heads": 4}, (1, 8192), BF16, Path(WIDE, True, False, True)),
    ],
)
def test_recorded_calls(seen, arguments, shape, dtype, expected):
    layer = make_layer(**arguments)
    assert path(seen, layer, shape, dtype) == expected


@pytest.mark.parametrize(
    ("shape", "kwargs", "way"),
    [
        ((1, 300), {"cu_seqlens": BOUNDS}, "kernels"),
        ((2, 300), {"attention_mask": MASK}, "kernels"),
        ((1, 40_000), {"cu_seqlens": LONG_BOUNDS}, HOPPER),
    ],
)
def test_packed_and_padded_calls_are_not_replayed(seen, shape, kwargs, way):
    kwargs = {name: x.cuda() for name, x in kwargs.items()}
    assert path(seen, make_layer(), shape, BF16, **kwargs) == Path(way, False, True, False)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("QUASAR_GRAPHS", "0", Path(HOPPER, False, False, False)),
        ("QUASAR_KEEP_MIB", "0", Path(HOPPER, True, False, True)),
        ("QUASAR_BACKEND", "torch", Path("steps", True, False, False)),
        ("QUASAR_BACKEND", "triton", Path("kernels", True, False, True)),
        ("QUASAR_BACKEND", "cuda", Path(CUDA, True, False, True)),
    ],
)
def test_settings(seen, monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    assert path(seen, make_layer(), (1, 512), BF16) == expected


@pytest.mark.parametrize(
    ("tokens", "recorded", "graph"), [(1, False, True), (17, False, False), (1, True, False)]
)
def test_calls_with_a_cache(tokens, recorded, graph):
    layer, cache = make_layer(), QuasarCache()
    with torch.autocast("cuda", BF16):
        for n in (30, *[tokens] * 4):
            with torch.set_grad_enabled(recorded):
                x = torch.randn(2, n, 512, device="cuda")
                layer(x, past_key_values=cache, use_cache=True)
    assert (len(graphs(layer)) > len(backward_graphs(layer))) == graph
