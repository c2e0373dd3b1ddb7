"""The layer on a GPU, as validators call it, against float64."""

from functools import partial

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar.layer.library import MANY_TOKENS

from harness.worker.compare import figures
from quasar_kernels.reference import quasar_chunked, quasar_layer, relative_rms

pytestmark = pytest.mark.gpu


def reference(layer, x, **kwargs):
    return quasar_layer(layer.state_dict(keep_vars=True), x, num_heads=8, head_dim=64, **kwargs)


def exact(layer, x):
    """Return the float64 output, computed in long chunks because each needs several launches."""
    with torch.no_grad():
        return reference(layer, x, operator=partial(quasar_chunked, chunk=256))


@pytest.mark.parametrize("T", [1, 5, 512, 1000, 2048, 16_384, 65_536, 1_000_000])
def test_output_under_autocast(layer, T):
    x = torch.randn(1, T, 512, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y, _, _ = layer(x)
    assert y.requires_grad
    found = figures(y, exact(layer, x))
    # on other GPUs than Hopper, q, k and v of long sequences are rounded to bf16 before their
    # convolution; the error of a short sequence varies more
    rounded = torch.cuda.get_device_capability() != (9, 0) and T >= MANY_TOKENS
    assert found.relative_rms <= (1e-2 if rounded or T < 1000 else 8e-3)
    assert found.max_difference <= 0.1
    assert found.cosine >= 0.9999


PACKED = [0, 0, 1, 3, 20_000, 20_002, 40_000, 40_000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "bounds"), [((4, 10_000), None), ((1, 40_000), None), ((1, 40_000), PACKED)]
)
def test_output_of_several_sequences(layer, shape, bounds, dtype):
    x = torch.randn(*shape, 512, device="cuda").to(dtype)
    bounds = bounds if bounds is None else torch.tensor(bounds, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        y = layer(x, cu_seqlens=bounds)[0]
    lengths = [shape[1]] * shape[0] if bounds is None else bounds.diff().tolist()
    parts = (part.split(lengths) for part in (x.flatten(0, 1), y.flatten(0, 1)))
    for inputs, outputs in zip(*parts, strict=True):
        if len(inputs):
            found = figures(outputs, exact(layer, inputs[None].float())[0])
            assert found.relative_rms <= (1e-2 if len(inputs) > 100 else 2e-2)


SIZES = {
    "wider": {"hidden_size": 1024, "num_heads": 16, "head_dim": 64},
    "heads of 128": {"hidden_size": 2048, "num_heads": 16, "head_dim": 128},
    "no convolution": {"use_short_conv": False},
    "convolution with bias": {"conv_bias": True},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_other_sizes_and_settings(size, dtype):
    settings = {"hidden_size": 512, "num_heads": 8, "head_dim": 64} | SIZES[size]
    layer = QuasarAttention(**settings).to("cuda")
    x = torch.randn(2, 700, settings["hidden_size"], device="cuda")
    with torch.no_grad(), torch.autocast("cuda", dtype):
        y = layer(x)[0]
    heads = {name: settings[name] for name in ("num_heads", "head_dim")}
    with torch.no_grad():
        expected = quasar_layer(layer.state_dict(), x, **heads)
    assert y.dtype == dtype
    assert relative_rms(y, expected) <= (1e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("autocast", [False, True])
def test_slices_with_a_cache_equal_one_call(layer, autocast):
    x = torch.randn(1, 20_000, 512, device="cuda")
    cache, parts = None, []
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        whole = layer(x)[0]
        for part in x.split([8192, 1, 7, 8192, 64, 3544], dim=1):
            y, _, cache = layer(part, past_key_values=cache, use_cache=True)
            parts.append(y)
    streamed = torch.cat(parts, 1)
    assert relative_rms(streamed, whole.double()) <= (1e-2 if autocast else 1e-3)
    with torch.no_grad():
        expected = reference(layer, x)
    tail = slice(15_000, None)
    bound = 1.2 * relative_rms(whole[:, tail], expected[:, tail])
    assert relative_rms(streamed[:, tail], expected[:, tail]) <= bound


def test_fp32_without_autocast(layer):
    x = torch.randn(1, 700, 512, device="cuda")
    with torch.no_grad():
        # the limit leaves room for TF32, which cuBLAS uses only if the environment allows it
        assert relative_rms(layer(x)[0], reference(layer, x)) <= 1e-3
