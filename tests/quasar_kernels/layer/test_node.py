"""What a recorded call of the layer keeps for its backward pass."""

from __future__ import annotations

import pytest
import torch
from fla.ops.quasar.layer import node as layer_node
from fla.ops.quasar.layer.call import Call

CALL = Call(heads=8, head_dim=64, eps=1e-5, dtype=torch.bfloat16, cu_seqlens=None, backend="auto")
WIDE = CALL._replace(heads=16)


def inputs(tokens, width=512, batch=1):
    return torch.empty(batch, tokens, width, device="meta")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("QUASAR_KEEP_MIB", raising=False)


@pytest.mark.parametrize(
    ("call", "x", "kept"),
    [
        (CALL, inputs(16_384), False),  # may be replayed
        (CALL, inputs(16_385), True),
        (CALL, inputs(4096, batch=16), True),
        (CALL, inputs(380_000), True),
        (CALL, inputs(390_000), False),
        (CALL, inputs(1_000_000), False),
        (WIDE, inputs(131_072, 1024), True),
        (WIDE, inputs(200_000, 1024), False),
        (WIDE._replace(head_dim=128), inputs(4096, 2048, 4), True),
    ],
)
def test_the_shapes_decide(call, x, kept):
    assert layer_node.keeps(call, x) is kept


@pytest.mark.parametrize(
    "changed", [{"cu_seqlens": torch.tensor([0, 512])}, {"dtype": torch.float32}]
)
def test_short_calls_that_are_never_replayed_are_kept(changed):
    assert layer_node.keeps(CALL._replace(**changed), inputs(512))


def test_the_limit_is_a_setting(monkeypatch):
    kept = []
    for limit in ("0", "100", "1000"):
        monkeypatch.setenv("QUASAR_KEEP_MIB", limit)
        kept.append(layer_node.keeps(CALL, inputs(65_536)))
    assert kept == [False, False, True]


@pytest.mark.parametrize("limit", ["much", "-1", "1.5"])
def test_a_limit_that_is_no_whole_number_is_refused(monkeypatch, limit):
    monkeypatch.setenv("QUASAR_KEEP_MIB", limit)
    with pytest.raises(ValueError, match=f"QUASAR_KEEP_MIB is '{limit}'"):
        layer_node.keeps(CALL, inputs(65_536))
