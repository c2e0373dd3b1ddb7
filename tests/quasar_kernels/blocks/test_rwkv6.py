"""RWKV-6 time mixing against its definition, token by token in float64."""

import pytest
import torch
import torch.nn.functional as F

from quasar_kernels.blocks import RWKV6TimeMixing
from tests.quasar_kernels.float64 import check

WIDTH, HEADS = 32, 2


def define(mixing, x):
    """Compute one sequence `[T, width]` by the published equations."""
    p = dict(mixing.named_parameters())
    S = WIDTH // HEADS
    state, before, outputs = torch.zeros(HEADS, S, S, dtype=x.dtype), torch.zeros_like(x[0]), []
    for token in x:
        moved = before - token
        low = torch.tanh((token + moved * p["mix_input"]) @ p["mix_down"]).view(5, -1)
        mixed = [token + moved * (p["mix"][n] + low[n] @ p["mix_up"][n]) for n in range(5)]
        w, k, v, r, g = mixed
        log = -torch.exp(p["decay"] + torch.tanh(w @ p["decay_down"]) @ p["decay_up"])
        k, v, r = (
            p[f"{name}.weight"] @ y for name, y in (("key", k), ("value", v), ("receptance", r))
        )
        k, v, r, log = (y.view(HEADS, S) for y in (k, v, r, log))
        written = k[:, :, None] * v[:, None, :]
        o = (r[:, :, None] * (state + p["bonus"][:, :, None] * written)).sum(1)
        state = torch.exp(log)[:, :, None] * state + written
        o = (o - o.mean(1, keepdim=True)) / (o.var(1, correction=0, keepdim=True) + 64e-5).sqrt()
        o = o.flatten() * p["norm.weight"] + p["norm.bias"]
        outputs.append(p["output.weight"] @ (o * F.silu(p["gate.weight"] @ g)))
        before = token
    return torch.stack(outputs), state


def test_the_layer_equals_the_definition():
    mixing = RWKV6TimeMixing(WIDTH, HEADS, 1, 4, mix_rank=4, decay_rank=6).double()
    for p in mixing.parameters():
        p.data += 0.1 * torch.randn_like(p)
    x = torch.randn(2, 70, WIDTH, dtype=torch.float64)
    y, state = mixing(x)
    for row in range(2):
        o, wkv = define(mixing, x[row])
        check((y[row], state.wkv[row]), (o, wkv), 1e-10)
    assert torch.equal(state.before, x[:, -1:])


def test_initial_decays_and_mixing_and_invalid_sizes():
    first, last = (RWKV6TimeMixing(WIDTH, HEADS, n, 4) for n in (0, 3))
    assert first.decay[0] == last.decay[0] == -6
    assert first.decay[-1] == last.decay[-1] == -1
    assert torch.equal(first.mix_input, 1 - torch.arange(WIDTH) / WIDTH)
    assert (first.mix[2] > last.mix[2]).all()  # values of upper layers mix in less of the past
    assert first.bonus.abs().max() < 0.11 < last.bonus.max()
    for arguments, words in (((30, 4), "30 and 4"), ((32, 4, 2, 2), "one of 0 to 1; got 2")):
        with pytest.raises(ValueError, match=words):
            RWKV6TimeMixing(*arguments)
