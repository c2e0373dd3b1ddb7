"""The calls that the fused projection of wide layers supports."""

import pytest
import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar.layer import paths, wide
from fla.ops.quasar.layer.call import Call
from fla.ops.quasar.layer.wrapped import plain_weights

BF16 = torch.bfloat16
CALL = Call(16, 64, 1e-5, BF16, None, "auto")


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setattr(wide, "find_program", lambda x, dtype, options=(): "program")
    monkeypatch.setattr(paths.hopper, "find_program", lambda x, dtype, options=(): None)
    monkeypatch.setattr(paths, "supports_kernels", lambda *_: True)
    monkeypatch.setattr(paths, "portable_is_faster", lambda *_: False)
    with torch.no_grad():
        yield


def make_layer(**options):
    with torch.device("meta"):
        return QuasarAttention(**{"hidden_size": 1024, "head_dim": 64, "num_heads": 16} | options)


def chosen(call, x, layer):
    """Return whether the kernel computes a call, and the products for its backward pass."""
    weights = plain_weights(layer)
    found = {f(call, x, weights).kernels is wide for f in (paths.choose, paths.choose_products)}
    (same,) = found
    return same


@pytest.mark.parametrize(
    ("options", "shape", "dtype", "backend", "supported"),
    [
        ({}, (1, 3000), BF16, "auto", True),
        ({}, (1, 3000), torch.float16, "cuda", True),
        ({}, (1, 3000), torch.float32, "auto", False),
        ({}, (1, 3000), BF16, "triton", False),
        ({}, (1, 2000), BF16, "auto", False),  # 16 x 12 tiles
        ({"head_dim": 32, "num_heads": 32}, (1, 3000), BF16, "auto", False),
        ({"num_heads": 15}, (1, 3000), BF16, "auto", False),  # 2,880 channels
        ({"hidden_size": 1000}, (1, 3000), BF16, "auto", False),
        ({"conv_bias": True}, (1, 3000), BF16, "auto", False),
        ({}, (4, 1000), BF16, "auto", True),
        ({}, (10, 500), BF16, "auto", False),  # the sequences are too short
    ],
)
def test_supported_calls(options, shape, dtype, backend, supported):
    layer = make_layer(**options)
    x = torch.empty(*shape, layer.hidden_size, device="meta")
    call = Call(layer.num_heads, layer.head_dim, 1e-5, dtype, None, backend)
    assert chosen(call, x, layer) is supported


def test_inputs_that_a_tensor_map_cannot_describe_are_not_supported():
    memory = torch.empty(3001 * 1024, dtype=BF16)
    contiguous = memory[: 3000 * 1024]
    shifted = memory[1 : 3000 * 1024 + 1]
    inputs = (
        (contiguous.view(1, 3000, 1024), True),
        (shifted.view(1, 3000, 1024), False),  # not aligned
        (contiguous.view(1, 1024, 3000).mT, False),  # columns are adjacent, not rows
        (memory.view(1, 3001, 1024)[:, :3000], True),
    )
    for number, (x, supported) in enumerate(inputs):
        assert chosen(CALL, x, make_layer()) is supported, number


def test_other_gpus_are_not_supported(monkeypatch):
    monkeypatch.undo()
    assert wide.find_program(torch.empty(1, 3000, 1024), BF16) is None
