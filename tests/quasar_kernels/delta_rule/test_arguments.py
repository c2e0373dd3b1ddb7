"""What the four functions take and refuse: the host's signatures, errors that name arguments."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from fla.ops import delta_rule as host_delta_rule
from fla.ops import gated_delta_rule as host_gated_delta_rule

from quasar_kernels import delta_rule
from quasar_kernels.delta_rule import host
from tests.quasar_kernels.delta_rule.calls import chunk, gradients, inputs, recurrent
from tests.quasar_kernels.inputs import packed

calls = pytest.mark.parametrize("call", [chunk, recurrent], ids=lambda f: f.__name__)
gates = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
FLOATS = "must be bf16, fp16, fp32 or fp64; got torch."


def refused(words: str, call, *arguments, **options) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        call(*arguments, **options)


def parameters(function) -> list[tuple[str, object]]:
    """Names and defaults of what may be passed by position, in their order."""
    found = inspect.signature(function).parameters.values()
    return [(x.name, x.default) for x in found if x.kind == x.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("name", delta_rule.__all__)
def test_signatures_and_defaults_are_the_host_s(name):
    owner = host_gated_delta_rule if "gated" in name else host_delta_rule
    assert parameters(getattr(delta_rule, name)) == parameters(getattr(owner, name))


def test_the_plain_rule_s_steps_are_one_where_they_are_not_given():
    x = inputs(20, group=2)
    given = recurrent(x._replace(beta=torch.ones_like(x.beta)), False)[0]
    assert torch.equal(delta_rule.fused_recurrent_delta_rule(x.q, x.k, x.v)[0], given)


@calls
@gates
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_dtypes_without_fractions_are_refused(call, gated, dtype):
    x = inputs(5)
    wrong = x._replace(q=x.q.to(dtype), k=x.k.to(dtype), v=x.v.to(dtype))
    refused(f"q {FLOATS}", call, wrong, gated)
    for name in ("q", "k", "v", "beta", *(["g"] if gated else [])):
        wrong = x._replace(**{name: getattr(x, name).to(dtype)})
        refused(name, call, wrong, gated)
        refused(FLOATS + str(dtype)[6:], call, wrong, gated)
    state = torch.zeros(1, 2, 16, 16, dtype=dtype)
    refused(FLOATS, call, x, gated, initial_state=state)


@calls
@pytest.mark.parametrize("wrong", [1.0, [1.0], "numpy"], ids=str)
def test_what_is_no_tensor_is_refused_by_name(call, wrong):
    x = inputs(5)
    for name in x._fields:
        value = getattr(x, name).numpy() if wrong == "numpy" else wrong
        words = f"^{name}.* must have shape .*; got {type(value).__name__}, no tensor"
        with pytest.raises(ValueError, match=words):
            call(x._replace(**{name: value}), True)
    refused("initial_state, one state a sequence,", call, x, True, initial_state=wrong)


@gates
def test_none_is_refused_where_a_tensor_is_needed(gated):
    x = inputs(5)
    for name in ("q", "k", "v", "beta", *(["g"] if gated else [])):
        with pytest.raises(ValueError, match=f"^{name}.* got NoneType, no tensor"):
            chunk(x._replace(**{name: None}), gated)


def test_a_layer_of_the_host_is_told_the_same():
    x = inputs(5)
    with host.switched():
        call = host_delta_rule.chunk_delta_rule
        refused("q must have shape [B, T, H, K]; got NoneType", call, None, x.k, x.v, x.beta)
        refused("beta must have shape [1, 5, 2]; got float", call, x.q, x.k, x.v, 1.0)


@calls
def test_a_tensor_elsewhere_is_named_with_both_devices(call):
    x = inputs(5)
    for name in ("k", "v", "beta", "g"):
        wrong = x._replace(**{name: getattr(x, name).to("meta")})
        with pytest.raises(ValueError, match=f"^{name}.* must be on cpu, .*; got meta"):
            call(wrong, True)
    state = torch.zeros(1, 2, 16, 16, device="meta")
    refused("like the other arguments; got meta", call, x, True, initial_state=state)


@calls
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_the_gate_s_parameters_fit_its_heads(call, name):
    x = inputs(70)
    for wrong, words in (
        (torch.zeros(70, 2), "must have shape [2]; got [70, 2]"),
        (torch.zeros(3), "must have shape [2]; got [3]"),
        (torch.zeros(2, device="meta"), "must be on cpu, like the other arguments; got meta"),
        (torch.zeros(2, dtype=torch.int64), FLOATS + "int64"),
        (0.5, "must have shape [2]; got float, no tensor"),
    ):
        parts = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2), name: wrong}
        refused(f"{name} {words}", call, x, True, use_gate_in_kernel=True, **parts)


@calls
@gates
def test_bounds_that_are_none_are_refused(call, gated):
    x = inputs(5)
    for wrong, words in (
        ([0, 5], "must be an int32 or int64 tensor [N + 1]; got list"),
        ((0, 5), "must be an int32 or int64 tensor [N + 1]; got tuple"),
        ("05", "must be an int32 or int64 tensor [N + 1]; got str"),
        (torch.tensor(5), "must have shape [N + 1], from 0 to T; got []"),
        (torch.tensor([[0, 5]]), "must have shape [N + 1], from 0 to T; got [1, 2]"),
        (torch.tensor([], dtype=torch.int64), "must have shape [N + 1], from 0 to T; got [0]"),
        (torch.tensor([0.0, 5.0]), "must be an int32 or int64 tensor; got torch.float32"),
        (packed([5]).to("meta"), "is on the meta device"),
        (torch.tensor([0, 4]), "must rise from 0 to T = 5; got [0, 4]"),
        (torch.tensor([1, 5]), "must rise from 0 to T = 5; got [1, 5]"),
        (torch.tensor([0, 9, 5]), "must rise from 0 to T = 5; got [0, 9, 5]"),
    ):
        refused(f"cu_seqlens {words}", call, x, gated, cu_seqlens=wrong)


@gates
def test_a_copy_of_the_bounds_is_one(gated):
    x, bounds = inputs(5), packed([2, 3])
    for wrong in (packed([3, 2]), packed([5])):
        words = f"must equal cu_seqlens, of [3]; got {wrong.tolist()}"
        refused(words, chunk, x, gated, cu_seqlens=bounds, cu_seqlens_cpu=wrong)
    refused(
        "cu_seqlens_cpu must be an int32", chunk, x, gated, cu_seqlens=bounds, cu_seqlens_cpu=[0, 5]
    )
    refused("cu_seqlens, which is None", chunk, x, gated, cu_seqlens_cpu=bounds)
    alone = chunk(x, gated, cu_seqlens=bounds)[0]
    both = chunk(x, gated, cu_seqlens=bounds, cu_seqlens_cpu=bounds.int())[0]
    assert torch.equal(alone, both)


@calls
@gates
@pytest.mark.parametrize("sizes", [{"H": 0}, {"K": 0}, {"group": 0}, {"V": 0}], ids=str)
def test_nothing_to_compute_a_token_is_refused(call, gated, sizes):
    x = inputs(5, **sizes)
    refused("q and v must have heads and channels; got [1, 5, ", call, x, gated)


@calls
@gates
@pytest.mark.parametrize("scale", ["x", [1.0], torch.tensor(1.0)], ids=str)
def test_a_scale_is_a_number(call, gated, scale):
    refused("scale must be a number", call, inputs(5), gated, scale=scale)


@calls
def test_a_state_s_shape_is_told_as_the_caller_has_it(call):
    x = inputs(5, V=8)
    state = torch.zeros(1, 2, 16, 8)
    refused(
        "must have shape [1, 2, 8, 16]; got [1, 2, 16, 8]",
        call,
        x,
        True,
        initial_state=state,
        state_v_first=True,
    )


@calls
@gates
@pytest.mark.parametrize("sizes", [{"T": 0}, {"T": 4, "B": 0}], ids=str)
def test_without_tokens_gradients_are_zeros(call, gated, sizes):
    x = inputs(**sizes)
    state = torch.zeros(x.q.shape[0], 2, 16, 16)
    for name in ("q", "k", "v", "beta", *(["g"] if gated else [])):

        def run(leaf, name=name):
            given = x._replace(**{name: leaf})
            return call(given, gated, initial_state=state, output_final_state=True)

        leaf = getattr(x, name)
        o, final, found = gradients(run, [leaf])
        assert o.shape == x.v.shape
        assert o.dtype == x.q.dtype
        assert torch.equal(final, state)
        assert found.shape == leaf.shape


@calls
def test_without_tokens_the_gate_s_gradients_are_zeros(call):
    x, log = inputs(0), torch.zeros(2, requires_grad=True)
    call(x, True, use_gate_in_kernel=True, A_log=log)[0].sum().backward()
    assert torch.equal(log.grad, torch.zeros(2))
