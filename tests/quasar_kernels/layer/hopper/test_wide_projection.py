"""Which calls the fused projection of wide layers takes."""

from __future__ import annotations

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.hopper import wide_projection as wide

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("options", "tokens", "dtype", "backend", "taken"),
    [
        ({}, 3000, BF16, "auto", True),
        ({}, 3000, torch.float16, "cuda", True),
        ({}, 3000, torch.float32, "auto", False),
        ({}, 3000, BF16, "triton", False),
        ({}, 2000, BF16, "auto", False),  # 16 x 12 tiles
        ({"head_dim": 32, "num_heads": 32}, 3000, BF16, "auto", False),
        ({"num_heads": 15}, 3000, BF16, "auto", False),  # 2,880 channels
        ({"hidden_size": 1000}, 3000, BF16, "auto", False),
        ({"conv_bias": True}, 3000, BF16, "auto", False),
    ],
)
def test_the_calls_that_it_takes(monkeypatch, options, tokens, dtype, backend, taken):
    monkeypatch.setattr(wide, "is_hopper", lambda x: True)
    usual = {"hidden_size": 1024, "head_dim": 64, "num_heads": 16}
    with torch.device("meta"):
        layer = QuasarAttention(**(usual | options))
        x = torch.empty(1, tokens, layer.hidden_size)
    call = Call(layer.num_heads, layer.head_dim, 1e-5, dtype, None, backend)
    with torch.no_grad():
        assert wide.takes(call, x, layer._weights()) is taken


@pytest.mark.parametrize(("shape", "taken"), [((4, 1000), True), ((10, 500), False)])
def test_it_takes_no_short_sequences(monkeypatch, shape, taken):
    monkeypatch.setattr(wide, "is_hopper", lambda x: True)
    call = Call(16, 64, 1e-5, BF16, None, "auto")
    weights = QuasarAttention(1024, 64, 16)._weights()
    with torch.no_grad():
        assert wide.takes(call, torch.empty(*shape, 1024, device="meta"), weights) is taken


def test_it_takes_no_input_that_a_tensor_map_cannot_describe(monkeypatch):
    monkeypatch.setattr(wide, "is_hopper", lambda x: True)
    call = Call(16, 64, 1e-5, BF16, None, "auto")
    weights = QuasarAttention(1024, 64, 16)._weights()
    memory = torch.empty(3001 * 1024, dtype=BF16)
    whole = memory[: 3000 * 1024]
    shifted = memory[1 : 3000 * 1024 + 1]
    inputs = (
        (whole.view(1, 3000, 1024), True),
        (shifted.view(1, 3000, 1024), False),  # at 2 bytes
        (whole.view(1, 1024, 3000).mT, False),  # columns are adjacent, not rows
        (memory.view(1, 3001, 1024)[:, :3000], True),
    )
    with torch.no_grad():
        for number, (x, taken) in enumerate(inputs):
            assert wide.takes(call, x, weights) is taken, number


def test_nothing_is_taken_without_a_hopper_gpu():
    call = Call(16, 64, 1e-5, BF16, None, "auto")
    x = torch.empty(1, 3000, 1024)
    assert not wide.takes(call, x, QuasarAttention(1024, 64, 16)._weights())
