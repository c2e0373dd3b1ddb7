"""Hooks, adapters, quantised and replaced submodules change the layer as they change a module."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from fla.layers.quasar import QuasarAttention, QuasarCache
from fla.ops.quasar.layer.wrapped import plain_weights
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from quasar_kernels.reference import quasar_recurrence, relative_rms

D, H, S = 24, 2, 12
LINEAR = ("q_proj", "k_proj", "v_proj", "g_proj.0", "g_proj.1", "o_proj")
CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")
NAMES = (*LINEAR, *CONVS, "g_proj", "o_norm")


def replace(layer, name, module):
    parent, _, last = name.rpartition(".")
    setattr(layer.get_submodule(parent), last, module)


def hook(layer, name):
    layer.get_submodule(name).register_forward_hook(lambda module, args, y: 2 * y)


def pre_hook(layer, name):
    layer.get_submodule(name).register_forward_pre_hook(
        lambda module, args: (0.5 * args[0], *args[1:])
    )


def own_forward(layer, name):
    module = layer.get_submodule(name)
    inner = module.forward
    module.forward = lambda *args: 2 * inner(*args)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrized(layer, name):
    parametrize.register_parametrization(layer.get_submodule(name), "weight", Doubled())


def weight_norm(layer, name):
    parametrizations.weight_norm(layer.get_submodule(name))
    layer.get_submodule(name).parametrizations.weight.original0.data.mul_(1.5)


class Lora(nn.Module):
    """A low-rank adapter with the wrapped module's weight, as peft's."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 3, bias=False)
        self.up = nn.Linear(3, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def lora(layer, name):
    replace(layer, name, Lora(layer.get_submodule(name)))


class Int8Linear(nn.Linear):
    """Keeps its weight in int8 with a scale per row."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features)
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        rounded = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scale", scale)

    def forward(self, x):
        return F.linear(x, (self.weight * self.scale).to(x.dtype), self.bias)


def quantised(layer, name):
    replace(layer, name, Int8Linear(layer.get_submodule(name)))


class Doubling(torch.Tensor):
    """A weight whose products are twice those of its values."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            return 2 * F.linear(x, weight.as_subclass(torch.Tensor), *bias)
        return super().__torch_function__(func, types, args, kwargs or {})


def subclass(layer, name):
    module = layer.get_submodule(name)
    module.weight = nn.Parameter(module.weight.detach().clone().as_subclass(Doubling))


def biased(layer, name):
    old = layer.get_submodule(name)
    replace(layer, name, nn.Linear(old.in_features, old.out_features))


def sequential(layer, name):
    replace(layer, name, nn.Sequential(layer.get_submodule(name), Doubled()))


ATTACHED = [
    *((kind, name) for kind in (hook, own_forward) for name in NAMES),
    *((pre_hook, name) for name in (*LINEAR, *CONVS, "g_proj")),
    *((kind, name) for kind in (parametrized, weight_norm) for name in (*LINEAR, *CONVS)),
    *((kind, name) for kind in (lora, quantised, subclass, biased, sequential) for name in LINEAR),
]
ids = [f"{kind.__name__}-{name}" for kind, name in ATTACHED]
SOME = [(hook, "q_conv1d"), (lora, "k_proj"), (hook, "o_norm"), (biased, "v_proj")]


def make_layer(kind=None, name="", **options):
    torch.manual_seed(3)
    layer = QuasarAttention(D, S, H, **options)
    for p in layer.parameters():
        p.data += 0.1 * torch.randn_like(p)
    if kind is not None:
        kind(layer, name)
    return layer


def reference(layer, x):
    """Compute one batch by the layer's modules, and the recurrence in float64."""

    def convolved(name):
        rows = F.pad(getattr(layer, f"{name}_proj")(x).mT, (layer.conv_size - 1, 0))
        y = F.silu(getattr(layer, f"{name}_conv1d")(rows)).mT
        return y.unflatten(-1, (H, S)).double()

    q, k, v = map(convolved, "qkv")
    o, _ = quasar_recurrence(q, k, v, F.softplus(layer.beta_log).double())
    gate = layer.g_proj(x).unflatten(-1, (H, S))
    return layer.o_proj(layer.o_norm(o.float(), gate).flatten(-2))


def gradients(y, x, layer):
    parameters = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(y.square().sum(), [x, *parameters.values()], allow_unused=True)
    return dict(zip(["x", *parameters], found, strict=True))


@pytest.mark.parametrize(("kind", "name"), ATTACHED, ids=ids)
def test_outputs_and_gradients_are_those_of_the_modules(kind, name):
    layer, x = make_layer(kind, name), torch.randn(2, 9, D, requires_grad=True)
    plain = make_layer()(x)[0]
    y, wanted = layer(x)[0], reference(layer, x)
    assert relative_rms(y, wanted.double()) <= 1e-5
    if kind is not quantised and (kind, name) != (pre_hook, "o_norm"):
        assert relative_rms(y, plain.double()) > 1e-3  # so the comparison above means something
    found, expected = gradients(y, x, layer), gradients(wanted, x, layer)
    for each, gradient in expected.items():
        assert (gradient is None) == (found[each] is None), each
        assert gradient is None or relative_rms(found[each], gradient.double()) <= 1e-4, each


@pytest.mark.parametrize(("kind", "name"), SOME)
@pytest.mark.parametrize("recorded", [False, True])
def test_calls_with_a_cache(kind, name, recorded):
    layer, x = make_layer(kind, name), torch.randn(2, 40, D)
    cache, parts = QuasarCache(), []
    with torch.set_grad_enabled(recorded):
        for part in x.split([0, 2, 10, 1, 1, 3, 20, 1, 2], 1):
            parts.append(layer(part, past_key_values=cache, use_cache=True)[0])
        assert relative_rms(torch.cat(parts, 1), reference(layer, x).double()) <= 1e-5


@pytest.mark.parametrize(("kind", "name"), SOME)
def test_packed_and_padded_calls(kind, name):
    layer, x = make_layer(kind, name), torch.randn(1, 30, D)
    bounds = [0, 0, 2, 15, 30]
    y, _, cache = layer(x, cu_seqlens=torch.tensor(bounds), use_cache=True)
    again = layer(x, cu_seqlens=torch.tensor(bounds), past_key_values=cache)[0]
    for a, b in pairwise(bounds[1:]):
        part = x[:, a:b]
        twice = reference(layer, torch.cat([part, part], 1))
        assert relative_rms(y[:, a:b], twice[:, : b - a].double()) <= 1e-5
        assert relative_rms(again[:, a:b], twice[:, b - a :].double()) <= 1e-5
    mask = torch.ones(1, 30)
    mask[:, :7] = 0
    y = layer(x, attention_mask=mask)[0]
    assert not y[:, :7].any()
    assert relative_rms(y[:, 7:], reference(layer, x[:, 7:]).double()) <= 1e-5


@pytest.mark.parametrize("options", [{"use_short_conv": False}, {"mode": "fused_recurrent"}])
def test_other_layers(options):
    layer, plain, x = (
        make_layer(hook, "o_proj", **options),
        make_layer(**options),
        torch.randn(2, 9, D),
    )
    assert relative_rms(layer(x)[0], 2 * plain(x)[0].double()) <= 1e-5


@pytest.mark.parametrize(("kind", "name"), SOME)
def test_modules_compute_in_the_caller_s_autocast(kind, name):
    layer, x, seen = make_layer(kind, name), torch.randn(2, 33, D), []
    layer.o_proj.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            y = layer(x)[0]
        assert y.dtype == seen[-1] == dtype
        assert relative_rms(y, reference(layer, x).double()) <= 3e-2


def test_a_layer_without_its_hook_computes_the_same_bits_as_before():
    layer, x = make_layer(), torch.randn(2, 9, D)
    before = layer(x)[0]
    handle = layer.v_proj.register_forward_hook(lambda *args: None)
    assert plain_weights(layer) is None
    assert relative_rms(layer(x)[0], before.double()) <= 1e-6
    handle.remove()
    assert torch.equal(layer(x)[0], before)


def test_backward_hooks_are_called():
    layer, seen = make_layer(), []
    layer.k_proj.register_full_backward_hook(lambda module, inputs, outputs: seen.append(module))
    layer(torch.randn(1, 5, D, requires_grad=True))[0].sum().backward()
    assert seen == [layer.k_proj]


def test_results_of_another_shape_are_refused():
    layer = make_layer()
    layer.q_proj = nn.Linear(D, D // 2)
    with pytest.raises(TypeError, match=r"q_proj must return .*\(2, 5, 24\).*\(2, 5, 12\)"):
        layer(torch.randn(2, 5, D))
    layer = make_layer()
    layer.k_conv1d = nn.Conv1d(D, D, 4, groups=D, padding=3)
    layer.q_proj.register_forward_hook(lambda *args: None)
    with pytest.raises(TypeError, match="without padding"):
        layer(torch.randn(2, 5, D))


@pytest.mark.parametrize(
    "options", [{}, {"use_short_conv": False}, {"mode": "fused_recurrent"}, {"conv_bias": True}]
)
@pytest.mark.parametrize("packed", [False, True])
def test_outputs_may_be_changed_in_place(options, packed):
    layer, x = make_layer(**options), torch.randn(1, 9, D, requires_grad=True)
    call = partial(layer, x, cu_seqlens=torch.tensor([0, 4, 9]) if packed else None)
    expected = gradients(call()[0] + x, x, layer)
    y = call()[0]
    y += x
    for name, gradient in gradients(y, x, layer).items():
        assert torch.equal(gradient, expected[name]), name
