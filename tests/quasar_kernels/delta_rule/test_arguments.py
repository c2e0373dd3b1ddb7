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
from tests.quasar_kernels.delta_rule.calls import Inputs, chunk, inputs, recurrent
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


def test_steps_are_one_where_they_are_not_given():
    x = inputs(20, group=2)
    given = recurrent(x._replace(beta=torch.ones_like(x.beta)), False)[0]
    for function in (
        delta_rule.fused_recurrent_delta_rule,
        delta_rule.fused_recurrent_gated_delta_rule,
    ):
        assert torch.equal(function(x.q, x.k, x.v)[0], given)


STATE = torch.zeros(1, 2, 16, 16)
STATES = "initial_state, one state a sequence,"
ELSEWHERE = "must be on cpu, like the other arguments; got meta"
INTEGERS = "cu_seqlens must be an int32 or int64 tensor"
BOUNDS = "cu_seqlens must have shape [N + 1], from 0 to T; got"
GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}
REFUSED = [
    *(({name: torch.Tensor.long}, f"{FLOATS}int64") for name in Inputs._fields),
    *(({name: torch.Tensor.numpy}, "got ndarray, no tensor") for name in Inputs._fields),
    *(({name: lambda t: t.to("meta")}, ELSEWHERE) for name in ("k", "v", "beta", "g")),
    ({"q": torch.Tensor.bool}, f"q {FLOATS}bool"),
    ({"v": lambda t: t.to(torch.complex64)}, f"{FLOATS}complex64"),
    ({"q": lambda t: None}, "q must have shape [B, T, H, K]; got NoneType, no tensor"),
    ({"k": lambda t: t[..., 1:]}, "k, as wide as q, must have shape"),
    ({"v": lambda t: t[:, :, :1]}, "a multiple of the 2 heads"),
    ({"beta": lambda t: 1.0}, "beta must have shape [1, 5, 2]; got float, no tensor"),
    ({"beta": lambda t: t[:, 1:]}, "beta must have shape"),
    ({"g": lambda t: t[..., :1]}, "g must have shape"),
    ({"initial_state": STATE.long()}, FLOATS),
    ({"initial_state": 1.0}, STATES),
    ({"initial_state": STATE.to("meta")}, ELSEWHERE),
    ({"initial_state": STATE.expand(2, -1, -1, -1)}, STATES),
    # the shape is that which the caller has
    ({"initial_state": STATE[..., :8], "state_v_first": True}, "16, 16]; got [1, 2, 16, 8]"),
    *(
        ({**GATE, name: wrong}, f"{name} {words}")
        for name in ("A_log", "dt_bias")
        for wrong, words in (
            (torch.zeros(70, 2), "must have shape [2]; got [70, 2]"),
            (torch.zeros(3), "must have shape [2]; got [3]"),
            (torch.zeros(2, device="meta"), ELSEWHERE),
            (torch.zeros(2, dtype=torch.int64), f"{FLOATS}int64"),
            (0.5, "must have shape [2]; got float, no tensor"),
        )
    ),
    ({"use_gate_in_kernel": True}, "needs A_log"),
    ({"allow_neg_eigval": True}, "use_beta_sigmoid_in_kernel=True"),
    ({"inverse": 1}, "unknown options inverse"),
    ({"cu_seqlens": [0, 5]}, f"{INTEGERS} [N + 1]; got list"),
    ({"cu_seqlens": "05"}, f"{INTEGERS} [N + 1]; got str"),
    ({"cu_seqlens": torch.tensor([0.0, 5.0])}, f"{INTEGERS}; got torch.float32"),
    ({"cu_seqlens": torch.tensor(5)}, f"{BOUNDS} []"),
    ({"cu_seqlens": torch.tensor([[0, 5]])}, f"{BOUNDS} [1, 2]"),
    ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, f"{BOUNDS} [0]"),
    ({"cu_seqlens": packed([5]).to("meta")}, "cu_seqlens is on the meta device"),
    ({"cu_seqlens": torch.tensor([0, 4])}, "must rise from 0 to T = 5; got [0, 4]"),
    ({"cu_seqlens": torch.tensor([1, 5])}, "must rise from 0 to T = 5; got [1, 5]"),
    ({"cu_seqlens": torch.tensor([0, 9, 5])}, "must rise from 0 to T = 5; got [0, 9, 5]"),
    *(({"scale": wrong}, "scale must be a number") for wrong in ("x", [1.0], torch.tensor(1.0))),
]
"""Changes of the inputs, options, and the words of the error."""
GATED_ONLY = {"g", *GATE, "allow_neg_eigval", "state_v_first"}


@calls
@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(call, change, words):
    x = inputs(5)
    options = {name: value for name, value in change.items() if name not in x._fields}
    wrong = {name: of(getattr(x, name)) for name, of in change.items() if name in x._fields}
    refused(words, call, x._replace(**wrong), True, **options)
    if not GATED_ONLY & set(change):
        refused(words, call, x._replace(**wrong), False, **options)


@calls
def test_packed_sequences_are_one_row(call):
    refused("B must be 1", call, inputs(10, B=2), True, cu_seqlens=packed([10]))


def test_what_the_kernels_do_not_do_is_refused():
    x = inputs(10)
    refused("decays a channel", recurrent, x, True, gk=x.k)
    refused("chunk_size is 20", chunk, x, False, chunk_size=20)


def test_a_layer_of_the_host_is_told_the_same():
    x = inputs(5)
    with host.switched():
        call = host_delta_rule.chunk_delta_rule
        refused("q must have shape [B, T, H, K]; got NoneType", call, None, x.k, x.v, x.beta)
        refused("beta must have shape [1, 5, 2]; got float", call, x.q, x.k, x.v, 1.0)


@gates
def test_a_copy_of_the_bounds_is_one(gated):
    x, bounds = inputs(5), packed([2, 3])
    for wrong, words in (
        (packed([3, 2]), "must equal cu_seqlens, of [3]; got [0, 3, 5]"),
        (packed([5]), "must equal cu_seqlens, of [3]; got [0, 5]"),
        ([0, 5], "cu_seqlens_cpu must be an int32"),
    ):
        refused(words, chunk, x, gated, cu_seqlens=bounds, cu_seqlens_cpu=wrong)
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
@pytest.mark.parametrize("sizes", [{"T": 0}, {"T": 4, "B": 0}], ids=str)
def test_without_tokens_gradients_are_zeros(call, gated, sizes):
    x = inputs(**sizes)
    state = torch.zeros(x.q.shape[0], 2, 16, 16)
    for name in ("q", "k", "v", "beta", *(["g"] if gated else [])):

        def run(leaf, name=name):
            given = x._replace(**{name: leaf})
            return call(given, gated, initial_state=state, output_final_state=True)

        leaf = getattr(x, name).requires_grad_()
        o, final = run(leaf)
        (found,) = torch.autograd.grad(o.sum() + final.sum(), leaf)
        assert o.shape == x.v.shape
        assert o.dtype == x.q.dtype
        assert torch.equal(final, state)
        assert found.shape == leaf.shape


@calls
def test_without_tokens_the_gate_s_gradients_are_zeros(call):
    x, log = inputs(0), torch.zeros(2, requires_grad=True)
    call(x, True, use_gate_in_kernel=True, A_log=log)[0].sum().backward()
    assert torch.equal(log.grad, torch.zeros(2))
