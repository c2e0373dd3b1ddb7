"""The adaptive layer on a CPU against its formula in float64."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from fla.layers.quasar import QuasarCache
from fla.layers.quasar_adaptive import AdaptiveQuasarAttention

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.layer.steps import exact_step, step

WIDTH, HEAD, HEADS = 24, 8, 3


def layer_of(dtype=torch.float32, **settings) -> AdaptiveQuasarAttention:
    torch.manual_seed(1)
    layer = AdaptiveQuasarAttention(WIDTH, HEAD, HEADS, layer_idx=0, **settings).to(dtype)
    with torch.no_grad():
        layer.dt_bias.normal_()
        layer.o_norm.weight.uniform_(0.5, 1.5)
    return layer


def test_parameters_have_the_names_and_shapes_of_the_public_layer_s():
    width, heads = (HEADS * HEAD, WIDTH), HEADS * HEAD
    shapes = {f"{name}_proj.weight": width for name in "qkvf"}
    shapes |= {f"{name}_conv1d.weight": (heads, 1, 4) for name in "qkv"}
    shapes |= {"b_proj.weight": (HEADS, WIDTH), "A_log": (HEADS,), "dt_bias": (heads,)}
    shapes |= {"g_proj.0.weight": (HEAD, WIDTH), "g_proj.1.weight": (heads, HEAD)}
    shapes |= {"g_proj.1.bias": (heads,), "o_norm.weight": (HEAD,), "o_proj.weight": width[::-1]}
    assert {name: tuple(p.shape) for name, p in layer_of().state_dict().items()} == shapes


def tables(tokens: int, channels: int = 4, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(first, first + tokens)[:, None] * torch.rand(channels // 2)
    angles = angles.repeat(1, 2)
    return angles.cos()[None, None], angles.sin()[None, None]


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"use_short_conv": False}, {"conv_bias": True}, {"mode": "fused_recurrent"}]
)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_output_and_all_gradients(rotate, settings, dtype, limit):
    layer, (x, dy) = layer_of(dtype, **settings), torch.randn(2, 2, 70, WIDTH, dtype=dtype)
    cos, sin = tables(70) if rotate else (None, None)
    found = step(layer, x, dy, cos=cos, sin=sin)
    exact = exact_step(layer, x, dy, rotation=[cos[0, 0], sin[0, 0]] if rotate else None)
    assert found.pop("f_proj.weight") is None  # unused, as in the public layer
    errors = {name: relative_rms(result, exact[name]) for name, result in found.items()}
    assert all(error <= limit for error in errors.values()), errors


def test_bf16_autocast_is_close_to_float64():
    layer, x = layer_of(), torch.randn(1, 200, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        y, rest = layer(x)
    assert rest is None
    assert y.dtype == torch.bfloat16
    error = relative_rms(y, exact_step(layer, x, x)["y"])
    assert error <= 1.5e-2, error


def test_padding_and_packing_equal_separate_calls():
    layer, lengths, T = layer_of(), [5, 0, 9], 9
    x = torch.randn(3, T, WIDTH)
    cos, sin = tables(T)
    mask = torch.zeros(3, T)
    for row, n in enumerate(lengths):
        mask[row, T - n :] = 1
    y, _ = layer(x, attention_mask=mask, cos=cos, sin=sin)
    for row, n in enumerate(lengths):
        assert (y[row, : T - n] == 0).all()
        if n:
            alone, _ = layer(
                x[row : row + 1, T - n :], cos=cos[:, :, T - n :], sin=sin[:, :, T - n :]
            )
            assert relative_rms(y[row : row + 1, T - n :], alone) < 1e-6
    packed = torch.cat([x[0, :5], x[2]])[None]
    bounds = torch.tensor([0, 5, 5, 14])
    y, _ = layer(packed, cu_seqlens=bounds)
    for first, last in ((0, 5), (5, 14)):
        assert relative_rms(y[:, first:last], layer(packed[:, first:last])[0]) < 1e-6


class ModelCache:
    """The cache of public model code: dictionaries of states by layer."""

    def __init__(self) -> None:
        self.recurrent_states: dict = {}
        self.conv_states: dict = {}

    def update_quasar_state(self, layer_idx, state, convs) -> None:
        self.recurrent_states[layer_idx] = state
        self.conv_states[layer_idx] = convs


@pytest.mark.parametrize("cache_type", [ModelCache, QuasarCache])
@pytest.mark.parametrize("conv", [True, False])
def test_cached_calls_equal_one_call(cache_type, conv):
    layer, x, cache = layer_of(use_short_conv=conv), torch.randn(2, 40, WIDTH), cache_type()
    cos, sin = tables(40)
    whole, _ = layer(x, cos=cos, sin=sin)
    parts = []
    with torch.no_grad():
        for first, last in ((0, 2), (2, 30), (30, 31), (31, 40)):
            piece = {"cos": cos[:, :, first:last], "sin": sin[:, :, first:last]}
            y, _ = layer(x[:, first:last], past_key_values=cache, use_cache=True, **piece)
            parts.append(y)
    assert relative_rms(torch.cat(parts, 1), whole) < 1e-6
    other = SimpleNamespace(**vars(cache)) if cache_type is ModelCache else copy.deepcopy(cache)
    with pytest.raises(ValueError, match="2 sequences, and this call has 3"):
        layer(torch.randn(3, 1, WIDTH), past_key_values=other, use_cache=True)


def test_hooks_and_replaced_projections_count():
    layer, x = layer_of(), torch.randn(1, 6, WIDTH)
    plain, _ = layer(x)
    calls = []
    names = ["q_proj", "b_proj", "g_proj", "k_conv1d", "o_norm", "o_proj"]
    for name in names:
        getattr(layer, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    assert relative_rms(layer(x)[0], plain) < 1e-6
    assert calls == names
    cached = QuasarCache()
    with torch.no_grad():
        parts = [layer(x[:, i : i + 3], past_key_values=cached, use_cache=True)[0] for i in (0, 3)]
    assert relative_rms(torch.cat(parts, 1), plain) < 1e-6
    for name in ("q_proj", "b_proj"):
        replaced = layer_of()
        assert replaced._plain_weights() is not None
        setattr(replaced, name, torch.nn.Linear(24, getattr(layer, name).out_features))
        assert replaced._plain_weights() is None  # the kernels add no bias
    layer.v_proj = torch.nn.Sequential(layer.v_proj, torch.nn.Linear(24, 24))
    assert relative_rms(layer(x)[0], plain) > 0.1


def test_calls_that_would_be_wrong_are_refused():
    layer, x = layer_of(), torch.randn(2, 6, WIDTH)
    cos, sin = tables(6)
    for message, call in (
        ("hidden_states", {"hidden_states": x[..., :5]}),
        ("attention_mask", {"attention_mask": torch.ones(1, 6)}),
        ("attention_mask has negative", {"attention_mask": torch.full((2, 6), -1e9)}),
        ("cos and sin must both", {"cos": cos}),
        ("cos and sin must have", {"cos": cos[:, :, :5], "sin": sin[:, :, :5]}),
        ("cos and sin must have", {"cos": tables(6, 10)[0], "sin": tables(6, 10)[1]}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 6])}),
    ):
        with pytest.raises(ValueError, match=message):
            layer(**{"hidden_states": x, **call})
    with pytest.raises(ValueError, match=r"cu_seq_lens_q \(did you mean cu_seqlens\?\)"):
        layer(x, cu_seq_lens_q=torch.tensor([0, 6]))
    layer.layer_idx = None
    with pytest.raises(ValueError, match="layer_idx"):
        layer(x, past_key_values=QuasarCache(), use_cache=True)
