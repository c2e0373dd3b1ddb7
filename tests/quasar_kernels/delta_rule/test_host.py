"""The host library's functions, switched over to these kernels, by its dispatch and by name."""

from __future__ import annotations

import types

import pytest
import torch
from fla import backends
from fla.ops.delta_rule import chunk_delta_rule as host_chunk

from quasar_kernels import delta_rule
from quasar_kernels.delta_rule import host
from tests.quasar_kernels.delta_rule.calls import inputs


@pytest.fixture
def layer_module(monkeypatch):
    """A module that imported the host's functions, as its layers do."""
    module = types.ModuleType("a_layer")
    for name, owner in host._HOSTS.items():
        setattr(module, name, getattr(owner, name))
    monkeypatch.setitem(__import__("sys").modules, "a_layer", module)
    return module


def test_a_module_s_functions_are_ours_within_the_block_and_the_host_s_behind(layer_module):
    x = inputs(40)
    with host.switched():
        for name in ("chunk_delta_rule", "fused_recurrent_delta_rule"):
            o, _ = getattr(layer_module, name)(x.q, x.k, x.v, x.beta)
            assert torch.equal(o, getattr(delta_rule, name)(x.q, x.k, x.v, x.beta)[0])
        o, _ = layer_module.chunk_gated_delta_rule(x.q, x.k, x.v, g=x.g, beta=x.beta)
        assert torch.equal(o, delta_rule.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)[0])
    assert layer_module.chunk_delta_rule is host_chunk


def test_an_error_within_the_block_gives_the_host_s_functions_back(layer_module):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), host.switched():
        fail()
    assert layer_module.chunk_delta_rule is host_chunk


def test_the_host_s_dispatch_takes_these_kernels(monkeypatch):
    registry = backends._get_operation_registry("gated_delta_rule")
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    host.register()
    x = inputs(40)
    o, _ = host.host_gated_delta_rule.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)
    assert torch.equal(o, delta_rule.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)[0])


def test_what_these_kernels_do_not_take_stays_the_host_s():
    x = inputs(4)
    gated = "chunk_gated_delta_rule"
    assert host.reason_against(gated, x.q, x.k, x.v, x.g, x.beta) is None
    for layout, reason in (
        ("contiguous", None),
        ("zigzag", "cp_context has the layout zigzag"),
    ):
        context = types.SimpleNamespace(layout=layout)
        taken = host.reason_against(gated, x.q, x.k, x.v, x.g, x.beta, cp_context=context)
        assert taken == reason
    recurrent = "fused_recurrent_gated_delta_rule"
    assert host.reason_against(recurrent, x.q, x.k, x.v, x.g, x.k) == "gk is given"
    wide = x.beta.unsqueeze(-1).expand_as(x.v)
    reason = host.reason_against("fused_recurrent_delta_rule", x.q, x.k, x.v, wide)
    assert reason is not None
    assert "more than one value" in reason
