"""The Mamba-2 layer against its definition, token by token in float64."""

import pytest
import torch
import torch.nn.functional as F

from quasar_kernels.blocks import Mamba2
from tests.quasar_kernels.float64 import check

WIDTH, HEADS, STATE, GROUPS = 24, 4, 16, 2
INNER = 2 * WIDTH


def define(layer, x):
    """Compute one sequence `[T, width]` by the published equations."""
    p = dict(layer.named_parameters())
    state = torch.zeros(HEADS, STATE, INNER // HEADS, dtype=x.dtype)
    inputs = torch.zeros(3, INNER + 2 * GROUPS * STATE, dtype=x.dtype)
    taps, outputs = p["convolution.weight"].squeeze(1), []
    for token in x:
        projected = p["input.weight"] @ token
        gate, mixed, step = projected.tensor_split([INNER, projected.numel() - HEADS])
        inputs = torch.cat([inputs, mixed[None]])
        mixed = F.silu((inputs[-4:].T * taps).sum(1) + p["convolution.bias"])
        values, B, C = mixed.tensor_split([INNER, INNER + GROUPS * STATE])
        values = values.view(HEADS, -1)
        B, C = (y.view(GROUPS, STATE).repeat_interleave(HEADS // GROUPS, 0) for y in (B, C))
        dt = F.softplus(step + p["step_bias"])
        decay = torch.exp(-dt * p["rate_log"].exp())
        written = dt[:, None, None] * B[:, :, None] * values[:, None, :]
        state = decay[:, None, None] * state + written
        y = (C[:, :, None] * state).sum(1) + p["skip"][:, None] * values
        y = y.flatten() * F.silu(gate)
        y = y / (y.square().mean() + 1e-5).sqrt() * p["norm"]
        outputs.append(p["output.weight"] @ y)
    return torch.stack(outputs), state, inputs[-3:]


def test_the_layer_equals_the_definition():
    layer = Mamba2(WIDTH, HEADS, STATE, groups=GROUPS).double()
    for p in layer.parameters():
        p.data += 0.1 * torch.randn_like(p)
    x = torch.randn(2, 70, WIDTH, dtype=torch.float64)
    y, state = layer(x)
    for row in range(2):
        found = (y[row], state.ssd[row], state.before[row])
        check(found, define(layer, x[row]), 1e-10)


def test_initial_step_sizes_and_rates():
    layer = Mamba2(64, 128, expand=2)
    step = F.softplus(layer.step_bias)
    assert 0.99e-3 < step.min() < 2e-3
    assert 5e-2 < step.max() < 1.01e-1
    assert 1 <= layer.rate_log.exp().min() < 2 < 14 < layer.rate_log.exp().max() <= 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state": 8}, "16 to 128; got 8"),
        ({"state": 16.0}, "state must be a whole number from 1; got 16.0"),
        ({"heads": True}, "heads must be a whole number from 1; got True"),
        ({"eps": -1e-5}, "eps must be a finite number from 0; got -1e-05"),
        ({"eps": float("nan")}, "eps must be a finite number from 0; got nan"),
        ({"heads": 7}, "got 7 heads and 1 groups"),
        ({"groups": 3}, "got 4 heads and 3 groups"),
    ],
)
def test_invalid_sizes(options, words):
    with pytest.raises(ValueError, match=words):
        Mamba2(**({"width": WIDTH, "heads": HEADS} | options))
