"""The kernels around the operator on a GPU, and packed, padded and cached calls of the layer."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fla.layers.quasar import QuasarCache
from fla.ops.quasar import fused_recurrent_quasar
from fla.ops.quasar.forward_substitution import quasar_forward_substitution
from fla.ops.quasar.gate import fused_quasar_gate
from fla.ops.quasar.layer.gate_and_norm import gate_and_norm
from fla.ops.quasar.layer.kernels import causal_conv_silu, gated_rmsnorm

from quasar_kernels.reference import quasar_recurrence, relative_rms, step_size
from tests.gpu.calls import H, S
from tests.quasar_kernels.float64 import with_float64
from tests.quasar_kernels.tolerances import GRADIENT, OPERATOR

pytestmark = pytest.mark.gpu

D = 512


def test_memory_of_a_million_tokens(layer):
    x = torch.randn(1, 1_000_000, D, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)[0]
    assert y.requires_grad
    assert torch.cuda.max_memory_allocated() <= 12e9
    y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
    assert torch.cuda.max_memory_allocated() <= 24e9


def test_packed_padded_and_cached_calls_equal_plain_calls(layer):
    x = torch.randn(2, 300, D, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        plain = layer(x)[0]
        packed = layer(x.reshape(1, 600, D), cu_seqlens=torch.tensor([0, 300, 600]).cuda())[0]
        mask = torch.ones(2, 300, device="cuda")
        mask[0, :100] = 0
        padded = layer(x, attention_mask=mask)[0]
        alone = layer(x[:1, 100:])[0]
        cache = QuasarCache()
        parts = [layer(x[:, :280], past_key_values=cache, use_cache=True)[0]]
        for t in range(280, 300):
            parts.append(layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0])
    assert relative_rms(packed.view(2, 300, D), plain) <= 1e-2
    assert relative_rms(padded[0, 100:], alone[0]) <= 1e-2
    assert not padded[0, :100].any()
    assert relative_rms(torch.cat(parts, 1), plain) <= 1.5e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["one", "equal", "packed"])
@pytest.mark.parametrize("R", [3, 70_002])
def test_convolution_and_gradients(dtype, kind, R):
    C = 1536
    packed = (torch.arange(R, device="cuda") % 777).int()
    position = {"one": None, "equal": R // 3, "packed": packed}[kind]
    bias = torch.randn(C, device="cuda") if kind == "packed" else None
    found, wanted = with_float64(
        lambda *x: causal_conv_silu(*x, position),
        lambda *x: causal_conv_silu(*x, position),
        torch.randn(R, C + 64, device="cuda", dtype=dtype)[:, :C],
        torch.randn(C, 4, device="cuda"),
        bias,
    )
    limit = 1e-6 if dtype == torch.float32 else 3e-3
    for x, w in zip(found, wanted, strict=True):
        assert relative_rms(x, w) <= limit


def test_convolution_of_a_wider_input_rounds_once():
    x, taps = torch.randn(1000, 1536, device="cuda"), torch.randn(1536, 4, device="cuda")
    y = causal_conv_silu(x, taps, dtype=torch.bfloat16)
    assert torch.equal(y, causal_conv_silu(x, taps).bfloat16())


def test_convolution_of_more_than_2_31_elements():
    R, C = (1 << 31) // 1536 + 5000, 1536
    x = torch.empty(R, C, device="cuda", dtype=torch.bfloat16).normal_()
    taps = torch.randn(C, 4, device="cuda")
    y = causal_conv_silu(x, taps)
    wanted = causal_conv_silu(x[-2003:].double(), taps.double())
    assert relative_rms(y[-2000:], wanted[3:]) <= 3e-3


@pytest.mark.parametrize("width", [48, 64, 256])
def test_gated_norm_and_gradients(width):
    x, gate = (torch.randn(100_001, width, device="cuda").bfloat16() for _ in range(2))
    norm = partial(gated_rmsnorm, eps=1e-5)
    found, wanted = with_float64(norm, norm, x, gate, torch.rand(width, device="cuda"))
    for x, w in zip(found, wanted, strict=True):
        assert relative_rms(x, w) <= 3e-3


@pytest.mark.parametrize(("heads", "width"), [(8, 64), (3, 128), (2, 48)])
def test_fused_gate_and_norm(heads, width):
    o = torch.randn(1001, heads, width, device="cuda").bfloat16()
    narrow = torch.randn(1001, 3 * width, device="cuda").bfloat16()[:, width : 2 * width]
    weight = (torch.randn(heads * width, width, device="cuda") / width**0.5).bfloat16()
    bias = torch.randn(heads * width, device="cuda").bfloat16()
    norm = torch.rand(width, device="cuda")
    y = gate_and_norm(o, narrow, weight, bias, norm, 1e-5)
    gate = F.linear(narrow.double(), weight.double(), bias.double()).view(o.shape)
    assert relative_rms(y, gated_rmsnorm(o.double(), gate, norm.double(), 1e-5)) <= 3e-3


def test_step_size_and_its_gradients():
    lam = 10.0 ** torch.empty(5000, H, device="cuda").uniform_(-12, 3)
    beta = torch.rand(H, device="cuda") * 5 + 0.1
    found, wanted = with_float64(fused_quasar_gate, step_size, lam, beta)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=3e-6, atol=0)
    for x, w in zip(found[1:], wanted[1:], strict=True):
        assert relative_rms(x, w) <= 1e-5


@pytest.mark.parametrize("C", [2, 16, 64, 128])
def test_inverses(C):
    L = torch.randn(300, 8, C, C, device="cuda") * 0.2
    eye = torch.eye(C, device="cuda", dtype=torch.float64)
    wanted = torch.linalg.inv(L.double().tril(-1) + eye)
    assert relative_rms(quasar_forward_substitution(L), wanted) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrent_kernel(dtype):
    q, k, v = (F.silu(torch.randn(1, 500, H, S, device="cuda")).to(dtype) for _ in range(3))
    beta = torch.rand(H, device="cuda") + 0.1
    cu = torch.tensor([0, 0, 100, 101, 500], device="cuda")
    initial = torch.randn(4, H, S, S, device="cuda")
    found, wanted = with_float64(
        lambda *x: fused_recurrent_quasar(*x, True, cu),
        lambda *x: quasar_recurrence(*x, cu),
        *(q, k, v, beta, initial),
    )
    for n, (x, w) in enumerate(zip(found, wanted, strict=True)):
        assert relative_rms(x, w) <= (OPERATOR if n < 2 else GRADIENT)[dtype]
