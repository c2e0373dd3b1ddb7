"""RWKV-6's time mixing and Mamba-2: slices, packed sequences, gradients and autocast."""

from types import SimpleNamespace

import pytest
import torch

from quasar_kernels.blocks import Mamba2, RWKV6TimeMixing, ssd, wkv6
from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.float64 import check
from tests.quasar_kernels.inputs import packed

WIDTH = 32
BF16, FP32 = torch.bfloat16, torch.float32
LAYERS = {
    "rwkv6": lambda: RWKV6TimeMixing(WIDTH, 2, 1, 3, mix_rank=4, decay_rank=6),
    "mamba2": lambda: Mamba2(WIDTH, 4, 16, groups=2),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


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
