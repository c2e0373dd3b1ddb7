"""fused_recurrent_quasar with inplace_state, on CPU tensors, against the float64 recurrence."""

import pytest
import torch
from fla.ops.quasar import fused_recurrent_quasar

from quasar_kernels.reference import quasar_recurrence, relative_rms
from tests.quasar_kernels.inputs import layer_like, packed
from tests.quasar_kernels.tolerances import OPERATOR


@pytest.mark.parametrize("dtype", OPERATOR)
def test_decoding_in_place_gives_the_result_of_one_call(dtype):
    q, k, v, beta = layer_like(20, B=3, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = torch.randn(3, 2, 16, 16, dtype=wide)
    expected, end = quasar_recurrence(q, k, v, beta, state)
    storage, steps = state.data_ptr(), []
    for t in range(20):
        token = (x[:, t : t + 1] for x in (q, k, v))
        o, state = fused_recurrent_quasar(*token, beta, state, inplace_state=True)
        assert state.data_ptr() == storage
        steps.append(o)
    assert relative_rms(torch.cat(steps, 1), expected) <= OPERATOR[dtype]
    assert relative_rms(state, end) <= OPERATOR[dtype]


def test_packed_sequences_in_place():
    lengths = [0, 1, 30, 0, 9]
    q, k, v, beta = layer_like(sum(lengths))
    state = torch.randn(len(lengths), 2, 16, 16)
    cu = packed(lengths)
    expected, end = quasar_recurrence(q, k, v, beta, state, cu)
    o, final = fused_recurrent_quasar(q, k, v, beta, state, cu_seqlens=cu, inplace_state=True)
    assert final is state
    assert relative_rms(o, expected) <= OPERATOR[torch.float32]
    assert relative_rms(state, end) <= OPERATOR[torch.float32]


def test_in_place_without_a_state_returns_a_new_one():
    q, k, v, beta = layer_like(7)
    _, final = fused_recurrent_quasar(q, k, v, beta, inplace_state=True)
    assert relative_rms(final, quasar_recurrence(q, k, v, beta)[1]) <= OPERATOR[torch.float32]


def test_a_state_that_autograd_saved_is_not_overwritten():
    q, k, v, beta = layer_like(7)
    state = torch.randn(1, 2, 16, 16, requires_grad=True)
    before = state.detach().clone()
    o, final = fused_recurrent_quasar(q, k, v, beta, state, inplace_state=True)
    (o.sum() + final.sum()).backward()
    wide = before.double().requires_grad_()
    expected, end = quasar_recurrence(q, k, v, beta, wide)
    (expected.sum() + end.sum()).backward()
    assert torch.equal(state, before)
    assert relative_rms(final, end) <= OPERATOR[torch.float32]
    assert relative_rms(state.grad, wide.grad) <= OPERATOR[torch.float32]


@pytest.mark.parametrize(
    "state",
    [torch.randn(1, 2, 16, 16, dtype=torch.bfloat16), torch.randn(1, 2, 16, 16).mT],
    ids=["bf16", "transposed"],
)
def test_a_state_that_cannot_hold_the_result_is_refused(state):
    with pytest.raises(ValueError, match="inplace_state needs a contiguous initial_state"):
        fused_recurrent_quasar(*layer_like(1), state, inplace_state=True)


def test_second_derivatives_are_refused():
    q, k, v, beta = layer_like(7)
    k.requires_grad_()
    o, _ = fused_recurrent_quasar(q, k, v, beta)
    (dk,) = torch.autograd.grad(o.sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (o.sum() + dk.square().sum()).backward()
