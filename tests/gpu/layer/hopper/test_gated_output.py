"""The fused output with its gated norm, and swizzled weight tiles, on a Hopper GPU."""

import pytest
import torch
import torch.nn.functional as F
from fla.ops.quasar.cuda.program import Variant
from fla.ops.quasar.layer import hopper
from fla.ops.quasar.layer.weight_tiles import Vector, WeightLayout, taps_layout

from tests.gpu.calls import ON_HOPPER
from tests.gpu.layer.fused_stages import GatedOutput
from tests.quasar_kernels.layer.fused_stages import pack_weights, taps_buffer

pytestmark = ON_HOPPER

S = 64


class TestGatedOutput(GatedOutput):
    kernels = hopper


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vectors_are_converted_to_fp32(dtype):
    program = hopper.PROGRAM.load(Variant(torch.cuda.current_device(), torch.bfloat16))
    taps = [torch.randn(512, 1, 4, device="cuda").to(dtype) for _ in range(3)]
    x = torch.linspace(-30, 30, 999, device="cuda").to(dtype)
    joined, copied, positive = taps_buffer(x), x.float() * 0, x.float() * 0
    vectors = (
        *taps_layout(tuple(taps), joined),
        Vector(x, copied),
        Vector(x, positive, softplus=True),
    )
    pack_weights(
        program, [WeightLayout(torch.ones(64, 64, device="cuda"))], torch.bfloat16, vectors
    )
    assert torch.equal(2 * joined, torch.cat(taps).squeeze(1).t().float())
    assert torch.equal(copied, x.float())
    assert torch.allclose(positive, F.softplus(x.double()).float(), rtol=2e-6, atol=0)


def swizzle(matrix, row_group, input_group):
    """Return the swizzled weight tiles as csrc/pack_weights.cu documents them, by indexing."""

    def order(n, group):
        place = torch.arange(n)
        p = place % group
        return place - p + group // 4 * (p // 2 % 4) + 2 * (p // 8) + p % 2

    rows, inputs = matrix.shape
    matrix = matrix.cpu()[order(rows, row_group)][:, order(inputs, input_group)]
    weight_tiles = []
    for tile in matrix.split(128):
        for tiles in tile.split(64, dim=1):
            pieces = tiles.reshape(-1, 8, 8)
            row = torch.arange(len(pieces))[:, None]
            weight_tiles.append(pieces[row, torch.arange(8) ^ row % 8].flatten())
    return torch.cat(weight_tiles)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_swizzled_weight_tiles(dtype):
    g = torch.randn(192, 512, device="cuda")
    scale = torch.rand(S, device="cuda")
    layouts = [
        WeightLayout(g),
        WeightLayout(g[:64], 32, 16),
        WeightLayout(g.half(), 16, 32, 0.5),
        WeightLayout(g.bfloat16(), 8, 16, 1.0, scale),
        WeightLayout(g, 32, fp16=True),
    ]
    weight_tiles = pack_weights(hopper.PROGRAM.load(Variant(g.device.index, dtype)), layouts, dtype)
    for layout, tiles in zip(layouts, weight_tiles, strict=True):
        matrix = layout.weight.float() * layout.factor
        if layout.scale is not None:
            matrix = matrix * scale.repeat(matrix.shape[1] // S)
        wanted = swizzle(matrix, layout.row_group, layout.input_group)
        wanted = wanted.to(torch.float16 if layout.fp16 else dtype)
        assert tiles.dtype == wanted.dtype
        assert torch.equal(tiles.cpu(), wanted)
