"""The convolution and the gated norm on CPU tensors, with their gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fla.ops.quasar.layer import gradients
from fla.ops.quasar.layer.kernels import causal_conv_silu, gated_rmsnorm

from tests.quasar_kernels.float64 import check, with_float64


def conv_by_sequences(x, weight, bias, lengths):
    """Compute the convolution of each sequence separately, by torch's conv1d."""
    W = weight.shape[1]
    parts = [
        F.conv1d(F.pad(part.T[None], (W - 1, 0)), weight[:, None], bias, groups=x.shape[1])[0].T
        for part in x.split(lengths)
    ]
    return F.silu(torch.cat(parts))


@pytest.mark.parametrize("W", [1, 3, 4])
@pytest.mark.parametrize("lengths", [[53], [20, 1, 2, 30], [11] * 5])
def test_convolution_and_gradients(W, lengths):
    position, rows = None, sum(lengths)
    if len(lengths) > 1:
        position = torch.cat([torch.arange(n) for n in lengths]).int()
    if len(lengths) == 5:
        position = lengths[0]
    wide = torch.randn(rows, 24, dtype=torch.float64)
    tensors = wide[:, :10], torch.randn(10, W, dtype=torch.float64), torch.randn(10).double()
    results, expected = with_float64(
        lambda *x: causal_conv_silu(*x, position),
        lambda *x: conv_by_sequences(*x, lengths),
        *tensors,
    )
    check(results, expected, 1e-13)


def test_gated_norm_and_gradients():
    tensors = torch.randn(30, 12).double(), torch.randn(30, 12).double(), torch.rand(12).double()
    results, expected = with_float64(
        partial(gated_rmsnorm, eps=1e-5),
        lambda x, gate, w: F.rms_norm(x, (12,), w, 1e-5) * torch.sigmoid(gate),
        *tensors,
    )
    check(results, expected, 1e-13)


def test_bf16_rounds_once():
    x, gate = torch.randn(40, 16).bfloat16(), torch.randn(40, 16).bfloat16()
    weight, taps = torch.rand(16), torch.randn(16, 4)
    wide = gated_rmsnorm(x.float(), gate.float(), weight, 1e-5)
    assert torch.equal(gated_rmsnorm(x, gate, weight, 1e-5), wide.bfloat16())
    assert torch.equal(causal_conv_silu(x, taps), causal_conv_silu(x.float(), taps).bfloat16())


@pytest.mark.parametrize("tokens", [1, 1 << 20, 1 << 25])
def test_the_grid_of_the_norm_s_gradient_covers_all_rows_within_cuda_s_limit(monkeypatch, tokens):
    launches = []
    monkeypatch.setattr(gradients, "_gated_rmsnorm_grad", lambda *x, **_: launches.append(x))
    x, weight = torch.empty(tokens, 8, 64, device="meta"), torch.empty(64, device="meta")
    gradients.launch_gated_rmsnorm_grad(x, x, weight, x, 1e-5)
    (((heads, programs, _), (*_, R, tiles, _), (*_, rows)),) = launches
    assert (heads, R) == (8, tokens)
    assert programs <= 65_535
    assert (programs - 1) * tiles * rows < tokens <= programs * tiles * rows
