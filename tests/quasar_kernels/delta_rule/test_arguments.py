"""The signatures of the functions, and their errors, which name the argument."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from fla.ops import delta_rule as fla_delta_rule
from fla.ops import gated_delta_rule as fla_gated_delta_rule
from fla.ops import kda as fla_kda

from quasar_kernels import delta_rule
from quasar_kernels.delta_rule import host
from tests.quasar_kernels.delta_rule.calls import (
    GATED,
    PLAIN,
    Inputs,
    chunk,
    inputs,
    recurrent,
    rules,
)
from tests.quasar_kernels.inputs import packed

gates = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
FLOATS = "must be bf16, fp16, fp32 or fp64; got torch."


def refused(words: str, call, *arguments, **options) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        call(*arguments, **options)


def parameters(function) -> list[tuple[str, object]]:
    """Return the names and defaults of the positional parameters."""
    found = inspect.signature(function).parameters.values()
    return [(x.name, x.default) for x in found if x.kind == x.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("name", delta_rule.__all__)
def test_signatures_and_defaults_are_fla_s(name):
    owners = {"kda": fla_kda, "gated": fla_gated_delta_rule, "delta": fla_delta_rule}
    owner = next(owner for word, owner in owners.items() if word in name)
    assert parameters(getattr(delta_rule, name)) == parameters(getattr(owner, name))


def test_default_step_sizes_are_1():
    x = inputs(20, group=2)
    expected = recurrent(x._replace(beta=torch.ones_like(x.beta)), False)[0]
    for function in (
        delta_rule.fused_recurrent_delta_rule,
        delta_rule.fused_recurrent_gated_delta_rule,
    ):
        assert torch.equal(function(x.q, x.k, x.v)[0], expected)


STATE = torch.zeros(1, 2, 16, 16)
STATES = "initial_state, one state per sequence,"
ELSEWHERE = "must be on cpu, like the other arguments; got meta"
INTEGERS = "cu_seqlens must be an int32 or int64 tensor"
BOUNDS = "cu_seqlens must have shape [N + 1], from 0 to T; got"
GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}
REFUSED = [
    *(({name: torch.Tensor.long}, f"{FLOATS}int64") for name in Inputs._fields),
    *(({name: torch.Tensor.numpy}, "got ndarray, not a tensor") for name in Inputs._fields),
    *(({name: lambda t: t.to("meta")}, ELSEWHERE) for name in ("k", "v", "beta", "g")),
    ({"v": lambda t: t.to(torch.complex64)}, f"{FLOATS}complex64"),
    ({"k": lambda t: t[..., 1:]}, "k, like q, must have shape"),
    ({"v": lambda t: t[:, :, :1]}, "a multiple of the 2 heads"),
    ({"beta": lambda t: t[:, 1:]}, "beta must have shape"),
    ({"g": lambda t: t[..., :1]}, "g must have shape"),
    ({"initial_state": STATE.to("meta")}, ELSEWHERE),
    ({"initial_state": STATE.expand(2, -1, -1, -1)}, STATES),
    # the message has the shape in the caller's layout
    ({"initial_state": STATE[..., :8], "state_v_first": True}, "16, 16]; got [1, 2, 16, 8]"),
    *(
        ({**GATE, name: wrong}, f"{name} {words}")
        for name in ("A_log", "dt_bias")
        for wrong, words in (
            (torch.zeros(3), "must have shape [2]; got [3]"),
            (torch.zeros(2, device="meta"), ELSEWHERE),
        )
    ),
    ({"use_gate_in_kernel": True}, "needs A_log"),
    ({"allow_neg_eigval": True}, "use_beta_sigmoid_in_kernel=True"),
    ({"inverse": 1}, "has no argument inverse (omit it)"),
    ({"cu_seqlen": packed([2, 3])}, "has no argument cu_seqlen (did you mean cu_seqlens?)"),
    ({"head_first": True}, "has no argument head_first (the inputs' layout is"),
    ({"cu_seqlens": [0, 5]}, f"{INTEGERS} [N + 1]; got list"),
    ({"cu_seqlens": torch.tensor([0.0, 5.0])}, f"{INTEGERS}; got torch.float32"),
    ({"cu_seqlens": torch.tensor([[0, 5]])}, f"{BOUNDS} [1, 2]"),
    ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, f"{BOUNDS} [0]"),
    ({"cu_seqlens": packed([5]).to("meta")}, "cu_seqlens is on the meta device"),
    ({"cu_seqlens": torch.tensor([1, 5])}, "must rise from 0 to T = 5; got [1, 5]"),
    ({"cu_seqlens": torch.tensor([0, 9, 5])}, "must rise from 0 to T = 5; got [0, 9, 5]"),
    ({"scale": torch.tensor(1.0)}, "scale must be a number"),
]
"""Changes of inputs and options, and a part of the error's message."""
GATED_ONLY = {"g", *GATE, "allow_neg_eigval", "state_v_first"}


GATES_OF_KDA = {"A_log", "dt_bias", "use_gate_in_kernel"}  # of other shapes: test_kda.py


def is_for(name: str, change) -> bool:
    """Return whether the function has these arguments, of these shapes."""
    others = GATED_ONLY if name in PLAIN else GATES_OF_KDA if "KDA" in name else set()
    return not others & set(change)


@pytest.mark.parametrize(
    ("rule", "change", "words"),
    [
        pytest.param(rule, change, words, id=f"{name}-{words}")
        for name, rule in (PLAIN | GATED).items()
        for change, words in REFUSED
        if is_for(name, change)
    ],
)
def test_errors_name_the_argument(rule, change, words):
    x = rule.draw(5)
    options = {name: value for name, value in change.items() if name not in x._fields}
    wrong = {name: of(getattr(x, name)) for name, of in change.items() if name in x._fields}
    refused(words, rule.call, x._replace(**wrong), **options)


@rules
def test_packed_sequences_must_be_one_row(rule):
    refused("B must be 1", rule.call, rule.draw(10, B=2), cu_seqlens=packed([10]))


def test_unsupported_options():
    x = inputs(10)
    refused("decays per channel", recurrent, x, True, gk=x.k)
    refused("chunk_size is 20", chunk, x, False, chunk_size=20)


def test_fla_s_functions_raise_the_same_errors_within_switched():
    x = inputs(5)
    with host.switched():
        call = fla_delta_rule.chunk_delta_rule
        refused("q must have shape [B, T, H, K]; got NoneType", call, None, x.k, x.v, x.beta)


@gates
def test_the_copy_of_the_bounds_must_be_equal(gated):
    x, bounds = inputs(5), packed([2, 3])
    for wrong, words in (
        (packed([3, 2]), "must equal cu_seqlens, of shape [3]; got [0, 3, 5]"),
        (packed([5]), "must equal cu_seqlens, of shape [3]; got [0, 5]"),
        ([0, 5], "cu_seqlens_cpu must be an int32"),
    ):
        refused(words, chunk, x, gated, cu_seqlens=bounds, cu_seqlens_cpu=wrong)
    refused("cu_seqlens, which is None", chunk, x, gated, cu_seqlens_cpu=bounds)
    alone = chunk(x, gated, cu_seqlens=bounds)[0]
    both = chunk(x, gated, cu_seqlens=bounds, cu_seqlens_cpu=bounds.int())[0]
    assert torch.equal(alone, both)


@rules
@pytest.mark.parametrize("sizes", [{"H": 0}, {"K": 0}, {"group": 0}, {"V": 0}], ids=str)
def test_heads_and_channels_are_required(rule, sizes):
    x = rule.draw(5, **sizes)
    refused("q and v must have heads and channels; got [1, 5, ", rule.call, x)


@rules
@pytest.mark.parametrize("sizes", [{"T": 0}, {"T": 4, "B": 0}], ids=str)
def test_without_tokens_gradients_are_zero_and_the_state_does_not_change(rule, sizes):
    x = rule.draw(**sizes)
    for leaf in x:
        leaf.requires_grad_()
    state = torch.randn(x.q.shape[0], 2, 16, 16, requires_grad=True)
    o, final = rule.call(x, initial_state=state, output_final_state=True)
    assert o.shape == x.v.shape
    assert o.dtype == x.q.dtype
    assert torch.equal(final, state)
    (o.sum() + final.sum()).backward()
    for leaf in x if rule.gated else x[:4]:
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))
    assert torch.equal(state.grad, torch.ones_like(state))


@rules
def test_without_tokens_a_state_that_is_not_recorded_does_not_change(rule):
    x, state = rule.draw(0), torch.randn(1, 2, 16, 16)
    assert torch.equal(rule.call(x, initial_state=state, output_final_state=True)[1], state)
