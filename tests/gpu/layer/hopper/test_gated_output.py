"""The gated norm inside the output's product, and the packing of weights, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fla.ops.quasar.cuda.program import Variant
from fla.ops.quasar.layer.hopper.gated_output import gated_output, output_layouts
from fla.ops.quasar.layer.hopper.program import PROGRAM, Vector, WeightLayout, swizzle_weights
from fla.ops.quasar.layer.hopper.projection import taps_buffer, taps_layout

from quasar_kernels.reference import relative_rms
from tests.gpu.calls import ON_HOPPER
from tests.quasar_kernels.tolerances import GATED_OUTPUT

pytestmark = ON_HOPPER

H, S = 8, 64
EPS = 1e-5


def layer_like(R, dtype=torch.bfloat16, outputs=512):
    """o with heads of different scales, narrow, and weights as a layer holds them."""
    o = torch.randn(R, H, S, device="cuda") * (0.05 + torch.rand(R, H, 1, device="cuda"))
    narrow = torch.randn(R, S, device="cuda")
    gate = (torch.rand(H * S, S, device="cuda") - 0.5) / 2
    bias = (torch.rand(H * S, device="cuda") - 0.5) * 2
    norm = 1 + 0.3 * torch.randn(S, device="cuda")
    out = (torch.rand(outputs, H * S, device="cuda") - 0.5) * 2 / (H * S) ** 0.5
    return o.to(dtype), narrow.to(dtype), gate, bias, norm, out


def run(o, narrow, gate, bias, norm, out, eps=EPS):
    program = PROGRAM.load(Variant(o.device.index, o.dtype))
    gate_weights, out_weights = swizzle_weights(program, output_layouts(gate, norm, out), o.dtype)
    return gated_output(program, o, narrow, gate_weights, bias, out_weights, eps)


def exact(o, narrow, gate, bias, norm, out, eps=EPS):
    o, narrow, gate, bias, norm, out = (x.double() for x in (o, narrow, gate, bias, norm, out))
    scale = (o.square().mean(-1, keepdim=True) + eps).rsqrt()
    gates = torch.sigmoid(F.linear(narrow, gate, bias)).view_as(o)
    return F.linear((o * scale * norm * gates).flatten(1), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_smaller_parameters_come_to_fp32(dtype):
    program = PROGRAM.load(Variant(torch.cuda.current_device(), torch.bfloat16))
    taps = [torch.randn(512, 1, 4, device="cuda").to(dtype) for _ in range(3)]
    x = torch.linspace(-30, 30, 999, device="cuda").to(dtype)
    joined, copied, positive = taps_buffer(x), x.float() * 0, x.float() * 0
    vectors = (
        *taps_layout(tuple(taps), joined),
        Vector(x, copied),
        Vector(x, positive, softplus=True),
    )
    swizzle_weights(
        program, [WeightLayout(torch.ones(64, 64, device="cuda"))], torch.bfloat16, vectors
    )
    assert torch.equal(2 * joined, torch.cat(taps).squeeze(1).t().float())
    assert torch.equal(copied, x.float())
    assert torch.allclose(positive, F.softplus(x.double()).float(), rtol=2e-6, atol=0)


def image_of(matrix, row_group, input_group):
    """What csrc/pack_weights.cu promises, by indexing alone."""

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


@pytest.mark.parametrize("R", [1, 63, 64, 65, 1000, 16_387, 100_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_matches_float64(R, dtype):
    inputs = layer_like(R, dtype)
    y, expected = run(*inputs), exact(*inputs)
    assert torch.isfinite(y).all()
    assert relative_rms(y, expected) <= GATED_OUTPUT[dtype]
    for part, wanted in zip(y.tensor_split(8), expected.tensor_split(8), strict=True):
        assert not len(part) or relative_rms(part, wanted) <= GATED_OUTPUT[dtype] * 1.5


@pytest.mark.parametrize("outputs", [128, 256, 384, 1024])
def test_every_width_of_the_output(outputs):
    inputs = layer_like(777, outputs=outputs)
    y = run(*inputs)
    assert y.shape == (777, outputs)
    assert relative_rms(y, exact(*inputs)) <= GATED_OUTPUT[torch.bfloat16]


def test_rows_of_narrow_may_be_apart():
    o, narrow, *weights = layer_like(300)
    wide = torch.full((300, 3 * S), float("nan"), device="cuda", dtype=o.dtype)
    wide[:, S : 2 * S] = narrow
    assert torch.equal(run(o, wide[:, S : 2 * S], *weights), run(o, narrow, *weights))


def test_a_token_depends_on_itself_alone():
    o, narrow, *weights = layer_like(5000)
    before = run(o, narrow, *weights)
    o[2500], narrow[2500] = float("nan"), float("nan")
    after = run(o, narrow, *weights)
    assert after[2500].isnan().all()
    others = torch.arange(5000, device="cuda") != 2500
    assert torch.equal(after[others], before[others])


def test_zero_heads_and_wide_gates_stay_finite():
    o, narrow, gate, bias, norm, out = layer_like(200)
    o[:, 3] = 0
    o[:, 5] *= 1e-3
    inputs = (o, narrow, (gate * 8).bfloat16(), bias, norm, out)
    assert relative_rms(run(*inputs), exact(*inputs)) <= GATED_OUTPUT[torch.bfloat16]


def test_repeated_runs_are_equal():
    inputs = layer_like(70_000)
    first = run(*inputs)
    assert all(torch.equal(run(*inputs), first) for _ in range(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_images_are_where_the_layout_says(dtype):
    g = torch.randn(192, 512, device="cuda")
    scale = torch.rand(S, device="cuda")
    layouts = [
        WeightLayout(g),
        WeightLayout(g[:64], 32, 16),
        WeightLayout(g.half(), 16, 32, 0.5),
        WeightLayout(g.bfloat16(), 8, 16, 1.0, scale),
        WeightLayout(g, 32, fp16=True),
    ]
    weight_tiles = swizzle_weights(PROGRAM.load(Variant(g.device.index, dtype)), layouts, dtype)
    for layout, tiles in zip(layouts, weight_tiles, strict=True):
        matrix = layout.weight.float() * layout.factor
        if layout.scale is not None:
            matrix = matrix * scale.repeat(matrix.shape[1] // S)
        wanted = image_of(matrix, layout.row_group, layout.input_group)
        wanted = wanted.to(torch.float16 if layout.fp16 else dtype)
        assert tiles.dtype == wanted.dtype
        assert torch.equal(tiles.cpu(), wanted)
