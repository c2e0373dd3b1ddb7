"""The operators' cases: their inputs, and the implementations that they call."""

import os

import pytest
import torch

from benchmarks.cases import delta_rule, kda, operator
from benchmarks.cases.delta_rule import GATED, RULES, draw, selected
from benchmarks.engine.comparison import Shape
from benchmarks.mechanisms import kda as of_kda


def test_decays_are_those_of_a_fresh_layer():
    torch.manual_seed(0)
    g = draw(GATED, Shape(1, 200, 4096, 1), "cpu")["g"]
    assert (g <= 0).all()
    # the median of A is 8, that of dt .01, and softplus of noise around its inverse near dt
    assert 0.03 < -g.median() < 0.25


def test_every_implementation_is_found():
    for name in operator.NAMES:
        with operator.selected(name) as function:
            assert callable(function)


@pytest.mark.parametrize("rule", RULES)
def test_a_token_changes_the_state_in_place(rule):
    x, state = draw(rule, Shape(3, 1, 2, 8), "cpu"), torch.randn(3, 2, 8, 8)
    before = state.clone()
    with delta_rule.function_of("triton", rule, "fused_recurrent") as function:
        o = delta_rule.step("triton", function, x, state)
    assert not torch.equal(state, before)
    assert o.shape == x["q"].shape


def test_a_token_of_kda_changes_the_state_in_place():
    x, state = of_kda.draw(Shape(3, 1, 2, 16), "cpu"), torch.randn(3, 2, 16, 16)
    before = state.clone()
    assert kda.step("triton", x, state).shape == x["v"].shape
    assert not torch.equal(state, before)
    assert all(callable(kda.function_of("fla", kind)) for kind in ("chunk", "fused_recurrent"))


def test_fla_is_not_timed_as_flashqla():
    from fla.ops.gated_delta_rule.backends import FlashQLABackend

    backend = FlashQLABackend()
    assert backend.is_enabled(), "or the switch has nothing to switch off"
    with selected(GATED, "fla"):
        assert not backend.is_enabled()
    assert os.environ.get("FLA_FLASH_QLA") is None
