"""The fused projection on a Hopper GPU against float64, and when the layer takes it."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.program import Variant
from fla.ops.quasar.layer import forward as layer_forward
from fla.ops.quasar.layer.fused import FEWEST_TOKENS
from fla.ops.quasar.layer.hopper.program import PROGRAM, swizzle_weights
from fla.ops.quasar.layer.hopper.projection import (
    project,
    projection_layouts,
    taps_buffer,
    taps_layout,
)
from fla.ops.quasar.layer.hopper.stages import KERNELS

from quasar_kernels.reference import relative_rms
from tests.gpu.calls import ON_HOPPER
from tests.quasar_kernels.tolerances import PROJECTION

pytestmark = ON_HOPPER


def weights():
    """The layer's: those of q, k, v and the narrow gate, and three convolutions'."""
    wide = [torch.randn(512, 512, device="cuda") / 512**0.5 for _ in range(3)]
    narrow = torch.randn(64, 512, device="cuda") / 512**0.5
    taps = [torch.rand(512, 1, 4, device="cuda") - 0.5 for _ in range(3)]
    return wide, narrow, taps


def run(x, wide, narrow, taps, dtype):
    program = PROGRAM.load(Variant(x.device.index, dtype))
    packed_taps = taps_buffer(x)
    weight_tiles = swizzle_weights(
        program, projection_layouts(*wide, narrow), dtype, taps_layout(tuple(taps), packed_taps)
    )
    return project(program, x, weight_tiles[0], packed_taps, dtype)


def exact(x, wide, narrow, taps, dtype):
    """The same in float64, of x and weights rounded as the kernel takes them."""
    x = x.to(dtype).double()
    mixed = x @ torch.cat(wide).to(dtype).double().T
    mixed = F.pad(mixed.T.unsqueeze(0), (3, 0))
    mixed = F.conv1d(mixed, torch.cat(taps).double(), groups=1536)
    return F.silu(mixed)[0].T, x @ narrow.to(dtype).double().T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [1, 3, 4, 63, 64, 65, 512, 1000, 2048, 4099, 16_387, 33_793, 100_000])
def test_it_matches_float64(T, dtype):
    x = torch.randn(T, 512, device="cuda")
    parts = weights()
    for found, expected in zip(run(x, *parts, dtype), exact(x, *parts, dtype), strict=True):
        assert found.dtype == dtype
        assert torch.isfinite(found).all()
        assert relative_rms(found, expected) <= PROJECTION[dtype]
        # every row, those at the joints of runs and tiles among them
        wrong = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert wrong.max() <= 3 * PROJECTION[dtype]


def test_a_token_reaches_itself_and_three_more():
    T, changed = 40_000, 20_001
    x = torch.randn(T, 512, device="cuda")
    parts = weights()
    before = run(x, *parts, torch.bfloat16)
    x[changed] += 1
    after = run(x, *parts, torch.bfloat16)
    rows = (before[0] != after[0]).any(1).nonzero().flatten()
    assert rows.tolist() == list(range(changed, changed + 4))
    assert (before[1] != after[1]).any(1).nonzero().flatten().tolist() == [changed]


def test_reruns_are_bitwise_equal():
    x = torch.randn(70_000, 512, device="cuda")
    parts = weights()
    first, second = (run(x, *parts, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_it_counts_past_two_to_the_31st_element():
    T = 1_500_000
    x = torch.randn(T, 512, device="cuda")
    parts = weights()
    found = run(x, *parts, torch.bfloat16)
    expected = exact(x[-2003:], *parts, torch.bfloat16)
    for result, wanted in zip(found, expected, strict=True):
        assert relative_rms(result[-2000:], wanted[-2000:]) <= PROJECTION[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1, 100, 1e6])  # the largest is beyond fp16
def test_what_is_out_of_range_stays_finite(factor, dtype):
    wide, narrow, taps = weights()
    x = torch.randn(500, 512, device="cuda")
    large, taps = [1e6 * w for w in wide], [factor * t for t in taps]
    found, _ = run(x, large, narrow, taps, dtype)
    assert torch.isfinite(found).all()


def forward(layer, x):
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        return layer(x)[0]


def test_the_layer_takes_it_for_many_tokens_and_agrees_with_the_other_way(layer, monkeypatch):
    taken = []

    def recorded(program, x, *rest):
        taken.append(x.shape[0])
        return project(program, x, *rest)

    monkeypatch.setattr(layer_forward, "HOPPER", KERNELS._replace(project=recorded).stages())
    x = torch.randn(1, 40_077, 512, device="cuda")
    fused = forward(layer, x)
    forward(layer, x[:, : FEWEST_TOKENS - 1])
    forward(layer, x.expand(2, -1, -1))
    monkeypatch.setenv("QUASAR_BACKEND", "triton")
    plain = forward(layer, x)
    assert taken == [x.shape[1]]
    assert relative_rms(fused, plain) <= 1.2e-2


def test_a_failure_is_explained_once_and_the_other_way_serves(layer, monkeypatch, caplog):
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
