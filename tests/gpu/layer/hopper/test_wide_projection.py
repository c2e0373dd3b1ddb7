"""The fused projection for layers of other widths, on a Hopper GPU, against float64."""

import logging

import pytest
import torch
import torch.nn.functional as F
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.quasar.cuda.program import Variant
from fla.ops.quasar.layer import paths, wide

from quasar_kernels.reference import relative_rms
from tests.gpu.calls import ON_HOPPER, packed
from tests.gpu.layer.layers import call, make_layer
from tests.quasar_kernels.layer.steps import exact_step, step
from tests.quasar_kernels.tolerances import LAYER_GRADIENT, PROJECTION

pytestmark = ON_HOPPER

BF16, FP16 = torch.bfloat16, torch.float16
HEADS = {"num_heads": 4, "head_dim": 128}
"""Those of a layer that Hopper's other kernels do not support."""
dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)


def noise(T, inputs):
    return torch.randn(T, inputs, device="cuda")


def draw(inputs, channels, S):
    """Return weights of q, k, v and the narrow gate, and the taps."""
    weights = torch.randn(channels + S, inputs, device="cuda") / inputs**0.5
    return weights, torch.rand(channels, 4, device="cuda") - 0.5


def project(x, weights, taps, dtype=BF16, keep=False, options=()):
    program = wide.PROGRAM.load(Variant(x.device.index, dtype, options))
    return wide.project_wide(program, x.to(dtype), weights.to(dtype), taps, keep)


def exact(x, weights, taps, dtype=BF16):
    """Return the same three results in float64, for rounded x and weights."""
    C = taps.shape[0]
    products = x.to(dtype).double() @ weights.to(dtype).double().T
    mixed = F.conv1d(F.pad(products[:, :C].T, (3, 0)), taps.double().unsqueeze(1), groups=C)
    return F.silu(mixed).T, products[:, C:], products[:, :C]


@dtypes
@pytest.mark.parametrize(
    ("inputs", "channels", "S"),
    [(64, 256, 64), (256, 768, 64), (320, 1536, 128), (1024, 3072, 64), (2048, 6144, 128)],
)
@pytest.mark.parametrize("T", [1, 3, 124, 125, 126, 250, 251, 1000, 4099])
def test_results_match_float64(dtype, inputs, channels, S, T):
    x, parts = noise(T, inputs), draw(inputs, channels, S)
    for found, wanted in zip(project(x, *parts, dtype, True), exact(x, *parts, dtype), strict=True):
        assert found.dtype == dtype
        assert relative_rms(found, wanted) <= PROJECTION[dtype]
        wrong = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert wrong.max() <= 3 * PROJECTION[dtype]


def test_results_in_fp16_have_its_precision():
    x, parts = noise(1000, 512), draw(512, 1536, 128)
    found = project(x, *parts, keep=True, options=wide.FP16_RESULTS)
    wanted = exact(x, *parts)
    for result, exactly, dtype in zip(found, wanted, (FP16, BF16, FP16), strict=True):
        assert result.dtype == dtype
        assert relative_rms(result, exactly) <= PROJECTION[dtype]


def test_a_token_affects_itself_and_the_next_three():
    x, parts = noise(20_000, 512), draw(512, 1536, 64)
    before = project(x, *parts)
    for changed in (0, 124, 125, 10_001):
        other = x.clone()
        other[changed] += 1
        after = project(other, *parts)
        rows = (before[0] != after[0]).any(1).nonzero().flatten()
        assert rows.tolist() == list(range(changed, changed + 4))
        assert (before[1] != after[1]).any(1).nonzero().flatten().tolist() == [changed]


def test_repeated_projections_are_equal():
    x, parts = noise(30_000, 1024), draw(1024, 3072, 64)
    first = project(x, *parts, keep=True)
    for _ in range(3):
        assert all(map(torch.equal, project(x, *parts, keep=True), first))


def test_more_than_2_31_elements():
    x, parts = noise(720_000, 1024), draw(1024, 3072, 64)
    found, wanted = project(x, *parts)[:2], exact(x[-1003:], *parts)[:2]
    for result, exactly in zip(found, wanted, strict=True):
        assert relative_rms(result[-1000:], exactly[-1000:]) <= PROJECTION[BF16]


@dtypes
@pytest.mark.parametrize("factor", [1, 1e6])  # the latter exceeds the range of fp16
def test_results_out_of_range_are_finite(dtype, factor):
    weights, taps = draw(512, 1536, 64)
    found, *_ = project(noise(500, 512), 1e4 * weights, factor * taps, dtype)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("shape", [(1, 3000), (3, 1001)])
def test_a_layer_and_its_gradients_match_float64(monkeypatch, shape):
    monkeypatch.setattr(paths, "MIN_WIDE_TILES", 1)
    layer, x = make_layer(**HEADS), torch.randn(*shape, 512, device="cuda")
    dy = torch.randn_like(x).bfloat16()
    found, wanted = step(layer, x, dy, BF16), exact_step(layer, x, dy)
    errors = {name: relative_rms(result, wanted[name]) for name, result in found.items()}
    assert all(error <= LAYER_GRADIENT[BF16] for error in errors.values()), errors


def test_packed_sequences_equal_separate_calls(monkeypatch):
    monkeypatch.setattr(paths, "MIN_WIDE_TILES", 1)
    monkeypatch.setattr(paths, "MIN_TOKENS", 1)
    layer, lengths = make_layer(**HEADS), [700, 2, 0, 125, 900]
    x = torch.randn(1, sum(lengths), 512, device="cuda")
    with torch.no_grad():
        together = call(layer, x, cu_seqlens=packed(lengths)).split(lengths, dim=1)
        for part, found in zip(x.split(lengths, dim=1), together, strict=True):
            if part.numel():
                # both results have 16 bits; one has fp32 products
                assert relative_rms(found, call(layer, part).double()) <= 2e-2


def test_after_a_failed_launch_the_library_path_runs(monkeypatch, caplog):
    def refuse(*_):
        raise CudaUnavailableError("refused")

    layer, x = make_layer(**HEADS), torch.randn(1, 20_000, 512, device="cuda")
    monkeypatch.setattr(wide.PROGRAM, "_entries", {})
    with torch.no_grad():
        expected = call(layer, x)
        monkeypatch.setattr(wide, "project_wide", refuse)
        with caplog.at_level(logging.WARNING, "fla.ops.quasar"):
            y = call(layer, x)
        assert "the fused projections of wide layers are not used: refused" in caplog.text
        monkeypatch.setattr(paths, "fits_wide", lambda *_: False)
        assert torch.equal(y, call(layer, x))
    assert relative_rms(y, expected.double()) <= 1e-2


def test_a_transposed_input_gives_the_same_result():
    layer, x = make_layer(**HEADS), torch.randn(1, 20_000, 512, device="cuda")
    with torch.no_grad():
        y = call(layer, x)
        transposed = x.mT.contiguous().mT
        assert not transposed.is_contiguous()
        assert relative_rms(call(layer, transposed), y.double()) <= 1e-2
