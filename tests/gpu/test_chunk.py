"""chunk_quasar in Triton on a GPU against float64: accuracy, causality, varlen, gradients."""

from __future__ import annotations

import pytest
import torch

from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_chunked, quasar_recurrence, relative_rms
from tests.gpu.gpu_inputs import (  # noqa: F401
    ADVERSARIAL_KEYS,
    LIMIT,
    H,
    S,
    assert_close,
    common_key,
    fresh,
    layer_like,
)

mount()

from fla.ops.quasar import chunk_quasar, fused_recurrent_quasar  # noqa: E402
from fla.ops.quasar.chunk import chunk_quasar_fwd, plan_segments  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _in_triton(monkeypatch):
    monkeypatch.setenv("QUASAR_BACKEND", "triton")  # cuda/scan is about the other path


@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 127, 512, 1000, 4096, 65_537, 1_000_000])
def test_output_matches_float64(T):
    inputs = layer_like(T)
    oracle = quasar_recurrence if T <= 512 else quasar_chunked
    expected, state = oracle(*inputs)
    o, final = chunk_quasar(*inputs, output_final_state=True)
    assert_close(o, expected, LIMIT[torch.bfloat16])
    assert relative_rms(final, state) <= LIMIT[torch.bfloat16]


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("heads", "width"), [(8, 64), (3, 32), (2, 128), (1, 48)])
def test_every_dtype_and_width(dtype, heads, width):
    inputs = layer_like(333, B=2, heads=heads, width=width, dtype=dtype)
    o, _ = chunk_quasar(*inputs)
    assert_close(o, quasar_recurrence(*inputs)[0], LIMIT[dtype])


@pytest.mark.parametrize("T", [4001, 20_000, 1_000_000])
@pytest.mark.parametrize("noise", [0.1, 0.01])
def test_correlated_keys(T, noise):
    q, k, v, beta = layer_like(T)
    k = common_key(k, noise)
    o, _ = chunk_quasar(q, k, v, beta)
    assert_close(o, quasar_chunked(q, k, v, beta)[0], 9e-3)


@pytest.mark.parametrize(
    ("keys", "limit"),
    [
        ("constant", 9e-3),
        ("alternating", 9e-3),
        ("mixed norms", 9e-3),
        ("half zeros", 6e-3),
        ("zeros", 0.0),
        ("large", 9e-3),
        ("tiny", 6e-3),
    ],
)
def test_adversarial_keys(keys, limit):
    q, k, v, beta = layer_like(3000)
    k = ADVERSARIAL_KEYS[keys](k).to(k.dtype)
    o, _ = chunk_quasar(q, k, v, beta)
    assert torch.isfinite(o).all()
    assert relative_rms(o, quasar_chunked(q, k, v, beta)[0]) <= limit


def test_the_future_does_not_reach_the_past():
    q, k, v, beta = layer_like(5000)
    before, _ = chunk_quasar(q, k, v, beta)
    cut = 3210
    for x in (q, k, v):
        x[:, cut:] = torch.randn_like(x[:, cut:])
    after, _ = chunk_quasar(q, k, v, beta)
    assert torch.equal(before[:, :cut], after[:, :cut])
    assert not torch.equal(before[:, cut:], after[:, cut:])


def test_the_number_of_segments_changes_the_rounding_only():
    inputs = layer_like(6000)
    expected, _ = quasar_chunked(*inputs)
    for n in (1, 2, 7, 50, 375):
        plan = plan_segments(inputs[0], None, segments=n)
        o = chunk_quasar_fwd(*inputs, plan=plan)[0]
        assert_close(o, expected, LIMIT[torch.bfloat16])


def test_reruns_are_bitwise_equal_and_inputs_stay():
    inputs = layer_like(70_000)
    copies = [x.clone() for x in inputs]
    first, _ = chunk_quasar(*inputs)
    second, _ = chunk_quasar(*inputs)
    assert torch.equal(first, second)
    assert all(torch.equal(x, c) for x, c in zip(inputs, copies, strict=True))


def test_packed_sequences_equal_separate_calls():
    lengths = [0, 1, 700, 0, 64, 9000, 65, 0]
    q, k, v, beta = layer_like(sum(lengths))
    initial = torch.randn(len(lengths), H, S, S, device="cuda")
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device="cuda")
    o, final = chunk_quasar(q, k, v, beta, initial, True, cu)
    start = 0
    for n, length in enumerate(lengths):
        part = [x[:, start : start + length] for x in (q, k, v)]
        expected, state = quasar_chunked(*part, beta, initial[n : n + 1])
        if length:
            assert relative_rms(o[:, start : start + length], expected) <= 6e-3
        assert relative_rms(final[n : n + 1], state) <= 6e-3
        start += length


def test_two_halves_with_the_state_carried_equal_the_whole():
    q, k, v, beta = layer_like(4001)
    expected, end = quasar_chunked(q, k, v, beta)
    o1, state = chunk_quasar(q[:, :1777], k[:, :1777], v[:, :1777], beta, None, True)
    o2, final = chunk_quasar(q[:, 1777:], k[:, 1777:], v[:, 1777:], beta, state, True)
    assert_close(torch.cat([o1, o2], 1), expected, LIMIT[torch.bfloat16])
    assert relative_rms(final, end) <= 6e-3


def test_strided_inputs_need_no_copy_to_be_right():
    q, k, v, beta = layer_like(900)
    wide = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    views = [x.unflatten(-1, (H, S)) for x in wide.split(H * S, -1)]
    assert not views[0].is_contiguous()
    assert torch.equal(chunk_quasar(*views, beta)[0], chunk_quasar(q, k, v, beta)[0])


def test_more_elements_than_32_bits_count():
    T = (1 << 31) // (H * S) + 5000
    q, k, v = (torch.randn(1, T, H, S, device="cuda", dtype=torch.bfloat16) * 0.3 for _ in range(3))
    beta = torch.ones(H, device="cuda")
    o, _ = chunk_quasar(q, k, v, beta)
    # what is far behind is forgotten: the last tokens from a fresh start, compared at their end
    tail = slice(T - 12_000, T)
    expected, _ = quasar_chunked(q[:, tail], k[:, tail], v[:, tail], beta)
    assert relative_rms(o[:, -2000:], expected[:, -2000:]) <= 6e-3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("heads", "width"), [(8, 64), (3, 32), (2, 128), (1, 48)])
def test_gradients_match_float64(packed, dtype, heads, width):
    T = 700
    q, k, v, beta = layer_like(T, heads=heads, width=width, dtype=dtype)
    n = 3 if packed else 1
    cu = torch.tensor([0, 200, 200, T], device="cuda") if packed else None
    initial = torch.randn(n, heads, width, width, device="cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v, beta, initial)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    do, dstate = torch.randn_like(q), torch.randn_like(initial)
    o, final = chunk_quasar(*leaves, True, cu)
    torch.autograd.backward([o, final], [do, dstate])
    expected = quasar_chunked(*wide, cu)
    torch.autograd.backward(list(expected), [do.double(), dstate.double()])
    for x, w in zip(leaves, wide, strict=True):
        # beta's gradient sums terms of both signs over all tokens, so its relative error is larger
        assert relative_rms(x.grad, w.grad) <= (1e-1 if x is leaves[3] else 1e-2)


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_and_grad_mode_change_nothing(grad):
    inputs = layer_like(640)
    expected, _ = chunk_quasar(*inputs)
    with torch.set_grad_enabled(grad), torch.autocast("cuda", torch.bfloat16):
        o, _ = chunk_quasar(*(x.requires_grad_(grad) for x in inputs))
    assert torch.equal(o, expected)


def test_one_token_at_a_time_equals_the_whole():
    q, k, v, beta = layer_like(40)
    expected, _ = quasar_recurrence(q, k, v, beta)
    state, steps = None, []
    for t in range(40):
        at = slice(t, t + 1)
        o, state = fused_recurrent_quasar(q[:, at], k[:, at], v[:, at], beta, state, True)
        steps.append(o)
    assert_close(torch.cat(steps, 1), expected, LIMIT[torch.bfloat16])
