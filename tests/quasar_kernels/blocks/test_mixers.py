"""RWKV-6's time mixing and Mamba-2 against their definitions, token by token in float64."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from quasar_kernels.blocks import Mamba2, RWKV6TimeMixing, ssd, wkv6
from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.float64 import check
from tests.quasar_kernels.inputs import packed

WIDTH, STATE, GROUPS = 32, 16, 2
BF16, FP32 = torch.bfloat16, torch.float32
LAYERS = {
    "rwkv6": lambda: RWKV6TimeMixing(WIDTH, 2, 1, 3, mix_rank=4, decay_rank=6),
    "mamba2": lambda: Mamba2(WIDTH, 4, STATE, groups=GROUPS),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def define_rwkv6(mixing, x):
    """Compute one sequence `[T, width]` by the published equations."""
    p = dict(mixing.named_parameters())
    H, S = 2, WIDTH // 2
    state, before, outputs = torch.zeros(H, S, S, dtype=x.dtype), torch.zeros_like(x[0]), []
    for token in x:
        moved = before - token
        low = torch.tanh((token + moved * p["mix_input"]) @ p["mix_down"]).view(5, -1)
        mixed = [token + moved * (p["mix"][n] + low[n] @ p["mix_up"][n]) for n in range(5)]
        w, k, v, r, g = mixed
        log = -torch.exp(p["decay"] + torch.tanh(w @ p["decay_down"]) @ p["decay_up"])
        k, v, r = (
            p[f"{name}.weight"] @ y for name, y in (("key", k), ("value", v), ("receptance", r))
        )
        k, v, r, log = (y.view(H, S) for y in (k, v, r, log))
        written = k[:, :, None] * v[:, None, :]
        o = (r[:, :, None] * (state + p["bonus"][:, :, None] * written)).sum(1)
        state = torch.exp(log)[:, :, None] * state + written
        o = (o - o.mean(1, keepdim=True)) / (o.var(1, correction=0, keepdim=True) + 64e-5).sqrt()
        o = o.flatten() * p["norm.weight"] + p["norm.bias"]
        outputs.append(p["output.weight"] @ (o * F.silu(p["gate.weight"] @ g)))
        before = token
    return torch.stack(outputs), x[-1:], state


def define_mamba2(layer, x):
    """Compute one sequence `[T, width]` by the published equations."""
    p, H, inner = dict(layer.named_parameters()), 4, 2 * WIDTH
    state = torch.zeros(H, STATE, inner // H, dtype=x.dtype)
    inputs = torch.zeros(3, inner + 2 * GROUPS * STATE, dtype=x.dtype)
    taps, outputs = p["convolution.weight"].squeeze(1), []
    for token in x:
        projected = p["input.weight"] @ token
        gate, mixed, step = projected.tensor_split([inner, projected.numel() - H])
        inputs = torch.cat([inputs, mixed[None]])
        mixed = F.silu((inputs[-4:].T * taps).sum(1) + p["convolution.bias"])
        values, B, C = mixed.tensor_split([inner, inner + GROUPS * STATE])
        values = values.view(H, -1)
        B, C = (y.view(GROUPS, STATE).repeat_interleave(H // GROUPS, 0) for y in (B, C))
        dt = F.softplus(step + p["step_bias"])
        decay = torch.exp(-dt * p["rate_log"].exp())
        written = dt[:, None, None] * B[:, :, None] * values[:, None, :]
        state = decay[:, None, None] * state + written
        y = (C[:, :, None] * state).sum(1) + p["skip"][:, None] * values
        y = y.flatten() * F.silu(gate)
        y = y / (y.square().mean() + 1e-5).sqrt() * p["norm"]
        outputs.append(p["output.weight"] @ y)
    return torch.stack(outputs), inputs[-3:], state


DEFINITIONS = {"rwkv6": define_rwkv6, "mamba2": define_mamba2}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_equals_the_definition(name):
    layer, x = LAYERS[name]().double(), torch.randn(2, 70, WIDTH, dtype=torch.float64)
    for p in layer.parameters():
        p.data += 0.1 * torch.randn_like(p)
    y, state = layer(x)
    for row in range(2):
        found = (each[row] for each in (y, *state))
        check(found, DEFINITIONS[name](layer, x[row]), 1e-10)


@layers
@pytest.mark.parametrize("first", [2, 17])  # Mamba-2's convolution reads three earlier tokens
def test_slices_equal_one_call_and_packed_sequences_equal_separate_calls(make, first):
    layer, x = make().double(), torch.randn(1, 40, WIDTH, dtype=torch.float64)
    for p in layer.parameters():
        p.data += 0.1 * torch.randn_like(p)
    whole, last = layer(x)
    state, parts = None, []
    for part in x.split([first, 1, 0, 1, 38 - first], 1):
        y, state = layer(part, state)
        parts.append(y)
    check((torch.cat(parts, 1), *state), (whole, *last), 1e-10)
    bounds = packed([first, 0, 40 - first])
    apart = torch.cat([layer(x[:, :first])[0], layer(x[:, first:])[0]], 1)
    y, state = layer(x, cu_seqlens=bounds)
    check([y], [apart], 1e-10)
    assert {len(s) for s in state} == {3}
    assert not any(s[1].any() for s in state)  # the sequence is empty
    again, _ = layer(x, state, bounds)
    third = type(state)(*(s[2:] for s in state))
    check([again[:, first:]], [layer(x[:, first:], third)[0]], 1e-10)


@layers
def test_nan_does_not_reach_earlier_tokens(make):
    layer, x = make(), torch.randn(1, 100, WIDTH)
    before, _ = layer(x)
    for t in (3, 30, 64):
        wrong = x.clone()
        wrong[:, t] = torch.nan
        after, _ = layer(wrong)
        assert torch.equal(after[:, :t], before[:, :t]), t
        assert after[:, t:].isnan().all()


@pytest.mark.parametrize(
    ("name", "operator", "dtypes", "late"),
    [
        # r, k, v, w, u; the `_down` matrices start at zero, so `late` gets no gradient at first
        ("rwkv6", wkv6.wkv6, [BF16, BF16, BF16, FP32, FP32], {"mix_input", "mix_up", "decay_up"}),
        ("mamba2", ssd.ssd, [BF16, FP32, FP32, BF16, BF16], set()),  # x, dt, A, B, C
    ],
)
def test_which_parameters_get_gradients_and_autocast_is_close(
    monkeypatch, name, operator, dtypes, late
):
    torch.manual_seed(3)
    layer, x = LAYERS[name](), torch.randn(2, 50, WIDTH)
    y, _ = layer(x)
    y.square().sum().backward()
    assert {n for n, p in layer.named_parameters() if not p.grad.any()} == late
    called, seen = operator.__name__, []

    def record(*arguments):
        seen.extend(y.dtype for y in arguments[:5])
        return operator(*arguments)

    fake = SimpleNamespace(**{called: record})
    monkeypatch.setattr(f"quasar_kernels.blocks.{name}.{called}", fake)
    with torch.autocast("cpu", BF16):
        half, _ = layer(x)
    assert half.dtype == BF16
    assert seen == dtypes
    assert relative_rms(half, y) < 3e-2


def test_initial_decays_and_mixing_and_invalid_sizes_of_rwkv6():
    first, last = (RWKV6TimeMixing(WIDTH, 2, n, 4) for n in (0, 3))
    assert first.decay[0] == last.decay[0] == -6
    assert first.decay[-1] == last.decay[-1] == -1
    assert torch.equal(first.mix_input, 1 - torch.arange(WIDTH) / WIDTH)
    assert (first.mix[2] > last.mix[2]).all()  # values of upper layers mix in less of the past
    assert first.bonus.abs().max() < 0.11 < last.bonus.max()
    for arguments, words in (((30, 4), "30 and 4"), ((32, 4, 2, 2), "one of 0 to 1; got 2")):
        with pytest.raises(ValueError, match=words):
            RWKV6TimeMixing(*arguments)


def test_initial_step_sizes_and_rates_of_mamba2():
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
def test_invalid_sizes_of_mamba2(options, words):
    with pytest.raises(ValueError, match=words):
        Mamba2(**({"width": 24, "heads": 4} | options))
