"""Whether a recorded call of the layer saves intermediate results for its backward pass."""

from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar.layer import autograd, paths
from fla.ops.quasar.layer.call import Call

CALL = Call(heads=8, head_dim=64, eps=1e-5, dtype=torch.bfloat16, cu_seqlens=None, backend="auto")
WIDE = CALL._replace(heads=16)
WEIGHTS = None  # are not read


def inputs(tokens, width=512):
    return torch.empty(1, tokens, width, device="meta")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setattr(paths, "supports_kernels", lambda *_: True)
    monkeypatch.delenv("QUASAR_KEEP_MIB", raising=False)


@pytest.mark.parametrize(
    ("call", "x", "saves"),
    [
        (CALL, inputs(16_384), False),  # may be replayed
        (CALL._replace(cu_seqlens=torch.tensor([0, 512])), inputs(512), True),  # never replayed
        (CALL._replace(dtype=torch.float32), inputs(512), True),  # never replayed
        (CALL, inputs(16_385), True),
        (CALL, inputs(380_000), True),
        (CALL, inputs(390_000), False),
        (WIDE, inputs(131_072, 1024), True),
        (WIDE, inputs(200_000, 1024), False),
    ],
)
def test_the_shapes_decide(call, x, saves):
    assert autograd.saves_results(call, x, WEIGHTS) is saves


@pytest.mark.parametrize(("longest", "saves"), [(512, True), (380_000, True), (390_000, False)])
@pytest.mark.parametrize("own", [0, 512, 380_000])
def test_all_ranks_decide_by_the_longest_slice(own, longest, saves):
    rank = SimpleNamespace(place=SimpleNamespace(longest=longest))
    assert autograd.saves_results(CALL, inputs(own), WEIGHTS, rank) is saves


def test_the_limit_is_a_setting_and_a_whole_number(monkeypatch):
    for limit, saves in (("0", False), ("100", False), ("1000", True)):
        monkeypatch.setenv("QUASAR_KEEP_MIB", limit)
        assert autograd.saves_results(CALL, inputs(65_536), WEIGHTS) is saves
    monkeypatch.setenv("QUASAR_KEEP_MIB", "1.5")
    with pytest.raises(ValueError, match=r"QUASAR_KEEP_MIB is '1\.5'"):
        autograd.saves_results(CALL, inputs(65_536), WEIGHTS)
