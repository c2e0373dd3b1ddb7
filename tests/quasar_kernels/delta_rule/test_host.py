"""fla's functions on these kernels: `switched` and `register`."""

import sys
import types

import pytest
import torch
from fla import backends
from fla.ops.delta_rule import chunk_delta_rule as fla_chunk

from quasar_kernels import delta_rule
from quasar_kernels.delta_rule import host
from tests.quasar_kernels.delta_rule.calls import inputs


@pytest.fixture
def layer_module(monkeypatch):
    """A module that imported fla's functions, as fla's layers do."""
    module = types.ModuleType("a_layer")
    for name, function in host._originals.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "a_layer", module)
    return module


def test_functions_are_replaced_within_the_block_only(layer_module):
    x = inputs(40)
    with host.switched():
        for name in ("chunk_delta_rule", "fused_recurrent_delta_rule"):
            o, _ = getattr(layer_module, name)(x.q, x.k, x.v, x.beta)
            assert torch.equal(o, getattr(delta_rule, name)(x.q, x.k, x.v, x.beta)[0])
        o, _ = layer_module.chunk_gated_delta_rule(x.q, x.k, x.v, g=x.g, beta=x.beta)
        assert torch.equal(o, delta_rule.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)[0])
    assert layer_module.chunk_delta_rule is fla_chunk
    with pytest.raises(ZeroDivisionError), host.switched():
        raise ZeroDivisionError
    assert layer_module.chunk_delta_rule is fla_chunk


def test_fla_s_dispatch_uses_these_kernels(monkeypatch):
    registry = backends._get_operation_registry("gated_delta_rule")
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    host.register()
    x = inputs(40)
    o, _ = host.fla_gated_delta_rule.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)
    assert torch.equal(o, delta_rule.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)[0])


def test_fla_computes_unsupported_calls():
    x = inputs(4)
    gated = "chunk_gated_delta_rule"
    for layout, expected in (("contiguous", None), ("zigzag", "cp_context has the layout zigzag")):
        context = types.SimpleNamespace(layout=layout)
        reason = host.reason_against(gated, x.q, x.k, x.v, x.g, x.beta, cp_context=context)
        assert reason == expected
    recurrent = "fused_recurrent_gated_delta_rule"
    assert host.reason_against(recurrent, x.q, x.k, x.v, x.g, x.k) == "gk is not None"
    wide = x.beta.unsqueeze(-1).expand_as(x.v)
    reason = host.reason_against("fused_recurrent_delta_rule", x.q, x.k, x.v, wide)
    assert reason == "beta has more than one value per token and head"
