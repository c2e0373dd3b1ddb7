"""The portable fused kernels on a GPU against float64, and the layer that runs them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fla.ops.quasar.cuda.program import Variant
from fla.ops.quasar.layer import forward as layer_forward
from fla.ops.quasar.layer.hopper.program import swizzle_weights
from fla.ops.quasar.layer.hopper.projection import taps_buffer, taps_layout
from fla.ops.quasar.layer.portable import program as portable
from fla.ops.quasar.layer.portable.stages import PORTABLE

from quasar_kernels.reference import relative_rms
from tests.gpu.calls import ON_CUDA_KERNELS
from tests.gpu.layer.layers import call, make_layer
from tests.quasar_kernels.tolerances import GATED_OUTPUT, PROJECTION

pytestmark = ON_CUDA_KERNELS

EPS = 1e-5
BF16 = torch.bfloat16
dtypes = pytest.mark.parametrize("dtype", [BF16, torch.float16])
lengths = pytest.mark.parametrize(
    "T", [1, 3, 4, 127, 128, 129, 512, 1000, 4099, 16_387, 33_793, 100_000]
)


def weights():
    """Those of q, k, v and the narrow gate, and three convolutions'."""
    wide = [torch.randn(512, 512, device="cuda") / 512**0.5 for _ in range(3)]
    narrow = torch.randn(64, 512, device="cuda") / 512**0.5
    taps = [torch.rand(512, 1, 4, device="cuda") - 0.5 for _ in range(3)]
    return wide, narrow, taps


def project(x, wide, narrow, taps, dtype):
    program = portable.PROGRAM.load(Variant(x.device.index, dtype))
    joined = taps_buffer(x)
    layouts = portable.projection_layouts(*wide, narrow)
    tiles = swizzle_weights(program, layouts, dtype, taps_layout(tuple(taps), joined))
    return portable.project(program, x, tiles[0], joined, dtype)


def exact_projection(x, wide, narrow, taps, dtype):
    """The same in float64, of x and weights rounded as the kernel takes them."""
    x = x.to(dtype).double()
    products = F.pad((x @ torch.cat(wide).to(dtype).double().T).T.unsqueeze(0), (3, 0))
    mixed = F.conv1d(products, torch.cat(taps).double(), groups=1536)
    return F.silu(mixed)[0].T, x @ narrow.to(dtype).double().T


@lengths
@dtypes
def test_the_projection_matches_float64(T, dtype):
    x, parts = torch.randn(T, 512, device="cuda"), weights()
    found = project(x, *parts, dtype)
    for result, wanted in zip(found, exact_projection(x, *parts, dtype), strict=True):
        assert relative_rms(result, wanted) <= PROJECTION[dtype]
        # every row, those at the joints of runs and tiles among them
        wrong = (result.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert wrong.max() <= 3 * PROJECTION[dtype]


def test_a_token_reaches_itself_and_three_more():
    T, changed = 40_000, 20_001
    x, parts = torch.randn(T, 512, device="cuda"), weights()
    before = project(x, *parts, BF16)
    x[changed] += 1
    after = project(x, *parts, BF16)
    rows = (before[0] != after[0]).any(1).nonzero().flatten()
    assert rows.tolist() == list(range(changed, changed + 4))
    assert (before[1] != after[1]).any(1).nonzero().flatten().tolist() == [changed]


def test_it_counts_past_two_to_the_31st_element():
    x, parts = torch.randn(1_500_000, 512, device="cuda"), weights()
    found = project(x, *parts, BF16)
    expected = exact_projection(x[-2003:], *parts, BF16)
    for result, wanted in zip(found, expected, strict=True):
        assert relative_rms(result[-2000:], wanted[-2000:]) <= PROJECTION[BF16]


@dtypes
def test_what_is_out_of_range_stays_finite(dtype):
    wide, narrow, taps = weights()
    x = torch.randn(500, 512, device="cuda")
    large = [1e6 * w for w in wide]
    for factor in (1, 100, 1e6):  # the largest is beyond fp16
        found, _ = project(x, large, narrow, [factor * t for t in taps], dtype)
        assert torch.isfinite(found).all()


def output_inputs(R, dtype, outputs=512):
    """o with heads of different scales, narrow, and weights as a layer holds them."""
    o = torch.randn(R, 8, 64, device="cuda") * (0.05 + torch.rand(R, 8, 1, device="cuda"))
    narrow = torch.randn(R, 64, device="cuda")
    gate = (torch.rand(512, 64, device="cuda") - 0.5) / 2
    bias = (torch.rand(512, device="cuda") - 0.5) * 2
    norm = 1 + 0.3 * torch.randn(64, device="cuda")
    out = (torch.rand(outputs, 512, device="cuda") - 0.5) * 2 / 512**0.5
    return o.to(dtype), narrow.to(dtype), gate, bias, norm, out


def gated_output(o, narrow, gate, bias, norm, out):
    program = portable.PROGRAM.load(Variant(o.device.index, o.dtype))
    tiles = swizzle_weights(program, portable.output_layouts(gate, norm, out), o.dtype)
    return portable.gated_output(program, o, narrow, tiles[0], bias, tiles[1], EPS)


def exact_output(*inputs):
    o, narrow, gate, bias, norm, out = (x.double() for x in inputs)
    scale = (o.square().mean(-1, keepdim=True) + EPS).rsqrt()
    gates = torch.sigmoid(F.linear(narrow, gate, bias)).view_as(o)
    return F.linear((o * scale * norm * gates).flatten(1), out)


@lengths
@dtypes
def test_the_output_matches_float64(T, dtype):
    inputs = output_inputs(T, dtype)
    y, expected = gated_output(*inputs), exact_output(*inputs)
    assert torch.isfinite(y).all()
    for part, wanted in zip(y.tensor_split(8), expected.tensor_split(8), strict=True):
        assert not len(part) or relative_rms(part, wanted) <= GATED_OUTPUT[dtype] * 1.5


@pytest.mark.parametrize("outputs", [128, 384, 1024])
def test_every_width_of_the_output(outputs):
    inputs = output_inputs(777, BF16, outputs)
    assert relative_rms(gated_output(*inputs), exact_output(*inputs)) <= GATED_OUTPUT[BF16]


def test_a_token_of_the_output_depends_on_itself_alone():
    o, narrow, *rest = output_inputs(5000, BF16)
    before = gated_output(o, narrow, *rest)
    o[2500], narrow[2500] = float("nan"), float("nan")
    after = gated_output(o, narrow, *rest)
    others = torch.arange(5000, device="cuda") != 2500
    assert after[2500].isnan().all()
    assert torch.equal(after[others], before[others])


def test_reruns_are_bitwise_equal():
    x, parts, inputs = (
        torch.randn(70_000, 512, device="cuda"),
        weights(),
        output_inputs(70_000, BF16),
    )
    first, y = project(x, *parts, BF16), gated_output(*inputs)
    for _ in range(3):
        assert all(map(torch.equal, project(x, *parts, BF16), first))
        assert torch.equal(gated_output(*inputs), y)


@pytest.mark.parametrize("tokens", [700, 16_384, 40_077])
def test_the_layer_agrees_with_the_library_path(monkeypatch, tokens):
    """Forward and backward, by whatever GPU: Hopper's own stages are left out."""
    monkeypatch.setattr(layer_forward, "HOPPER", PORTABLE)
    dy = torch.randn(1, tokens, 512, device="cuda")
    results = []
    for backend in ("cuda", "triton"):
        monkeypatch.setenv("QUASAR_BACKEND", backend)
        layer = make_layer()  # which sets the seed
        x = torch.randn(1, tokens, 512, device="cuda", requires_grad=True)
        y = call(layer, x)
        y.backward(dy.to(y.dtype))
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        results.append({"y": y.detach(), "x": x.grad, **gradients})
    found, wanted = results
    errors = {name: relative_rms(found[name], wanted[name]) for name in wanted}
    # the gradient of beta_log sums terms of either sign over all tokens, which cancel
    limits = {name: 6e-2 if name == "beta_log" else 2e-2 for name in errors}
    assert not {name: error for name, error in errors.items() if error > limits[name]}
