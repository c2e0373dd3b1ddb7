"""A language model of the public Quasar models' shape with the adaptive layer, against float64."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from fla.layers import quasar
from fla.layers.quasar_adaptive import AdaptiveQuasarAttention

from quasar_kernels.adaptive_reference import adaptive_layer_reference
from quasar_kernels.reference import relative_rms

SIZES = {"vocab_size": 31, "d_model": 24, "n_layers": 2, "n_heads": 3, "head_dim": 8}
SIZES |= {"dense_input_layers": 1}  # the second layer has experts
TOKENS = 24


class Norm(nn.Module):
    """The output norm's weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class PublicLayer(nn.Module):
    """The parameters of the public layer, by their names, and its formula, token by token."""

    def __init__(self, hidden_size, head_dim, num_heads, norm_eps, **_) -> None:
        super().__init__()
        width = num_heads * head_dim
        self.head_dim, self.eps = head_dim, norm_eps
        for name in "qkvf":
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, width, bias=False))
        for name in "qkv":
            conv = nn.Conv1d(width, width, 4, groups=width, bias=False)
            self.add_module(f"{name}_conv1d", conv)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.randn(width))
        narrow = nn.Linear(hidden_size, head_dim, bias=False)
        self.g_proj = nn.Sequential(narrow, nn.Linear(head_dim, width))
        self.o_norm = Norm(head_dim)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x, cos, sin):
        weights = {name: p.double() for name, p in self.named_parameters()}
        rotation = cos[0, 0], sin[0, 0]
        y = adaptive_layer_reference(weights, x.double(), self.head_dim, self.eps, rotation)
        return y.to(x.dtype), None


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], Any]:
    """Return a function that builds the model with a class in place of QuasarAttention."""

    def build_with(attention: type) -> Any:
        monkeypatch.setattr(quasar, "QuasarAttention", attention)
        file = Path(__file__).parent / "quasar_model" / "__init__.py"
        spec: Any = spec_from_file_location("model_code", file)
        code = module_from_spec(spec)
        spec.loader.exec_module(code)
        return code.QuasarForCausalLM(code.QuasarConfig(**SIZES))

    return build_with


def pair(build, dtype=torch.float32) -> tuple[Any, Any]:
    """Return a model with this project's layer, and the float64 model with the same weights."""
    exact = build(PublicLayer)
    ours = build(AdaptiveQuasarAttention)
    ours.load_state_dict(exact.state_dict())
    return ours.to(dtype), exact.double()


def tokens(batch: int = 2) -> torch.Tensor:
    """Return rows that repeat eight random tokens."""
    return torch.randint(SIZES["vocab_size"], (batch, 8)).repeat(1, TOKENS // 8)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.float64, 1e-11)])
def test_logits_and_all_gradients(build, dtype, limit):
    ours, exact = pair(build, dtype)
    ids = tokens()
    for model in (ours, exact):
        out = model(ids, labels=ids)
        out.loss.backward()
        model.logits = out.logits
    found, errors = dict(ours.named_parameters()), {}
    for name, wanted in exact.named_parameters():
        parameter = found.pop(name)
        if name.endswith("f_proj.weight"):  # unused, as in the public layer
            assert parameter.grad is None
        else:
            errors[name] = relative_rms(parameter.grad, wanted.grad)
    assert not found
    errors["logits"] = relative_rms(ours.logits, exact.logits)
    assert all(error <= limit for error in errors.values()), errors


def test_checkpoints_load_strictly_both_ways(build):
    public, ids = build(PublicLayer), tokens()
    ours = build(AdaptiveQuasarAttention)
    ours.load_state_dict(public.state_dict(), strict=True)
    wanted = public(ids).logits
    assert relative_rms(ours(ids).logits, wanted.double()) <= 1e-5
    again = build(PublicLayer)
    again.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(again(ids).logits, wanted)
