"""Training steps of the layer on a GPU: gradients against float64, and recomputation."""

from functools import partial

import pytest
import torch
from fla.ops.quasar.layer import graphs as layer_graphs

from quasar_kernels.reference import relative_rms
from tests.gpu.layer.layers import make_layer
from tests.quasar_kernels.layer.steps import exact_step
from tests.quasar_kernels.layer.steps import step as any_step
from tests.quasar_kernels.tolerances import BETA_GRADIENT, LAYER_GRADIENT

pytestmark = pytest.mark.gpu

SIZES = {
    "512": {},
    "1024": {"hidden_size": 1024, "num_heads": 16},
    "2048": {"hidden_size": 2048, "num_heads": 16, "head_dim": 128},
    "odd": {"hidden_size": 320, "num_heads": 5, "head_dim": 48},
    "wide heads": {"num_heads": 2, "head_dim": 256},
    "bias": {"conv_bias": True},
    "no convolution": {"hidden_size": 256, "num_heads": 4, "head_dim": 32, "use_short_conv": False},
    "three taps": {"hidden_size": 256, "num_heads": 4, "head_dim": 32, "conv_size": 3},
}


def draw(layer, B, T):
    shape = (B, T, layer.hidden_size)
    return torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda").bfloat16()


step = partial(any_step, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("size", "B", "bounds", "dtype"),
    [
        ("512", 1, [0, 36_000], torch.bfloat16),  # Hopper's fused forward pass
        ("512", 1, [0, 2048], torch.bfloat16),
        ("512", 1, [0, 16_384], torch.bfloat16),
        ("512", 5, [0, 4001], torch.bfloat16),
        ("512", 2, [0, 300], torch.bfloat16),
        ("512", 1, [0, 1, 1, 700, 5000], torch.bfloat16),
        ("512", 1, [0, 3000], torch.float32),
        ("1024", 1, [0, 9001], torch.bfloat16),
        ("2048", 1, [0, 5003], torch.bfloat16),
        ("odd", 2, [0, 700], torch.bfloat16),
        ("wide heads", 2, [0, 300], torch.bfloat16),
        ("bias", 2, [0, 1000], torch.float16),
        ("no convolution", 2, [0, 700], torch.bfloat16),
        ("three taps", 2, [0, 700], torch.bfloat16),
    ],
)
def test_gradients_match_float64_and_reruns_are_equal(monkeypatch, size, B, bounds, dtype):
    layer = make_layer(**SIZES[size])
    x, dy = draw(layer, B, bounds[-1])
    packed = {"cu_seqlens": torch.tensor(bounds, device="cuda")} if len(bounds) > 2 else {}
    monkeypatch.setattr(layer_graphs, "MAX_ELEMENTS", 0)
    found = []
    for limit in ("0", "0", "10000"):  # recomputed twice, then stored
        monkeypatch.setenv("QUASAR_KEEP_MIB", limit)
        found.append(step(layer, x, dy, dtype=dtype, **packed))
    wanted = exact_step(layer, x, dy, bounds)
    for name, gradient in found[0].items():
        limit = LAYER_GRADIENT[dtype]
        if name == "beta_log" and dtype == torch.bfloat16:
            limit = BETA_GRADIENT
        assert relative_rms(gradient, wanted[name]) <= limit, name
        assert all(torch.equal(gradient, other[name]) for other in found[1:]), name


@pytest.mark.parametrize("T", [1000, 40_000])
def test_checkpoints_and_compiled_models_give_the_same_bits(T):
    layer = make_layer()
    x, dy = draw(layer, 1, T)
    for _ in range(3):  # launched, captured, replayed
        plain = step(layer, x, dy)

    def checkpointed(x):
        return (torch.utils.checkpoint.checkpoint(lambda x: layer(x)[0], x, use_reentrant=False),)

    for call in (checkpointed, torch.compile(layer, backend="aot_eager")):
        found = step(layer, x, dy, call=call)
        for name, gradient in plain.items():
            assert torch.equal(found[name], gradient), name


def test_two_recorded_calls_have_separate_stored_results():
    layer = make_layer()
    inputs = [draw(layer, 1, 20_000) for _ in range(2)]
    wanted = [step(layer, x, dy)["x"] for x, dy in inputs]
    leaves = [x.requires_grad_() for x, _ in inputs]
    with torch.autocast("cuda", torch.bfloat16):
        outputs = [layer(x)[0] for x in leaves]
    torch.autograd.backward(outputs, [dy for _, dy in inputs])
    for leaf, gradient in zip(leaves, wanted, strict=True):
        assert torch.equal(leaf.grad, gradient)


def test_gradients_with_masks_and_caches():
    layer = make_layer()
    x, dy = draw(layer, 2, 300)
    mask = torch.ones(2, 300, device="cuda")
    mask[0, :100] = 0
    masked = step(layer, x, dy, attention_mask=mask)
    alone = step(layer, x[:1, 100:], dy[:1, 100:])
    assert relative_rms(masked["x"][:1, 100:], alone["x"]) <= 3e-2
    assert not masked["x"][0, :100].any()

    def in_slices(x):
        cache, parts = None, []
        for part in x.split([250, 50], dim=1):
            y, _, cache = layer(part, past_key_values=cache, use_cache=True)
            parts.append(y)
        return (torch.cat(parts, 1),)

    sliced, plain = step(layer, x, dy, call=in_slices), step(layer, x, dy)
    for name, gradient in plain.items():
        assert relative_rms(sliced[name], gradient) <= 3e-2, name


def test_long_calls_store_only_the_input():
    layer = make_layer()
    x = torch.randn(1, 400_000, 512, device="cuda")
    known = {p.data_ptr() for p in layer.parameters()} | {x.data_ptr()}
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cuda", torch.bfloat16),
    ):
        layer(x)
    assert kept
    assert {t.data_ptr() for t in kept} <= known
