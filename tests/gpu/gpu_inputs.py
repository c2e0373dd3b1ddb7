"""What the GPU tests share: marks, inputs like a layer's, a fresh start with poisoned memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quasar_kernels.reference import relative_rms

H, S = 8, 64
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3, torch.float32: 2e-5}
"""Largest relative RMS error against float64, by operand dtype, on layer-like inputs."""


CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _on_gpu_if(fits, reason):
    # where there is no GPU, conftest.py skips what is marked `gpu`
    return [pytest.mark.gpu, pytest.mark.skipif(CAPABILITY is not None and not fits, reason=reason)]


ON_CUDA_KERNELS = _on_gpu_if(CAPABILITY and CAPABILITY >= (8, 0), "needs compute capability 8.0")
"""Marks of tests of the kernels that are compiled for every GPU from 8.0 on."""
ON_HOPPER = _on_gpu_if(CAPABILITY == (9, 0), "needs compute capability 9.0")
"""Marks of tests of the kernels that are for Hopper alone."""


def layer_like(T, B=1, heads=H, width=S, dtype=torch.bfloat16):
    """q, k, v [B, T, heads, width] as a layer with default weights makes them, and beta."""
    qkv = []
    for _ in range(3):
        x = torch.randn(B, T, heads * width, device="cuda") / 3**0.5
        taps = (torch.rand(heads * width, 1, 4, device="cuda") - 0.5) / 2**0.5
        y = F.conv1d(F.pad(x.mT, (3, 0)), taps, groups=heads * width).mT
        qkv.append(F.silu(y).to(dtype).contiguous().view(B, T, heads, width))
    return *qkv, F.softplus(torch.empty(heads, device="cuda").uniform_(1, 16).log())


def common_key(k, noise):
    """Keys of k's shape that are one vector a head, and noise."""
    common = torch.randn(1, 1, *k.shape[2:], device="cuda")
    return (common + noise * torch.randn(k.shape, device="cuda")).to(k.dtype)


def _alternating(k):
    signs = 1 - 2 * (torch.arange(k.shape[1], device=k.device) % 2)
    return k[:, :1] * signs.view(1, -1, 1, 1)


ADVERSARIAL_KEYS = {
    "constant": lambda k: torch.ones_like(k) * 0.3,
    "alternating": _alternating,
    "mixed norms": lambda k: k * 10 ** torch.empty_like(k[..., :1]).uniform_(-3, 1),
    "half zeros": lambda k: k * (torch.rand_like(k[..., :1]) < 0.5),
    "zeros": torch.zeros_like,
    "large": lambda k: F.normalize(k.float(), dim=-1).bfloat16() * 80,
    "tiny": lambda k: F.normalize(k.float(), dim=-1).bfloat16() * 1e-6,
}
"""Keys that strain the kernels, made of layer-like ones `[1, T, H, S]`, by name."""


def poison():
    """Fill freed blocks of the allocator with NaN, so that an unwritten output shows."""
    junk = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 12, 1 << 18, 1 << 26)]
    del junk


def assert_close(o, expected, limit):
    """o is near float64's result as a whole, in every eighth of its tokens, and everywhere."""
    assert torch.isfinite(o).all()
    assert relative_rms(o, expected) <= limit
    for part, wanted in zip(o.tensor_split(8, 1), expected.tensor_split(8, 1), strict=True):
        assert relative_rms(part, wanted) <= limit * 1.05
    assert (o.double() - expected).abs().max() <= 0.1
    assert F.cosine_similarity(o.double().flatten(), expected.flatten(), dim=0) >= 0.999


@pytest.fixture(autouse=True)
def fresh():
    """Start each test of a module that imports this from one seed, in poisoned memory."""
    torch.manual_seed(0)
    poison()
    yield
    torch.cuda.empty_cache()
