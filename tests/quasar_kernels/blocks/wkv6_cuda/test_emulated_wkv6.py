"""WKV6's CUDA kernels and their host code, compiled for and run on a CPU."""

import contextlib
from functools import partial

import pytest
import torch

from quasar_kernels.blocks.wkv6_cuda import launch
from quasar_kernels.blocks.wkv6_cuda.launch import wkv6_cuda
from quasar_kernels.decay_reference import wkv6_recurrence
from tests.quasar_kernels.blocks.calls import WKV6, check_fp16_range, wkv6_inputs
from tests.quasar_kernels.cuda.emulated.programs import EMULATED
from tests.quasar_kernels.float64 import check, with_float64
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import GRADIENT, RECURRENCE

pytestmark = EMULATED

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def launched(monkeypatch, programs):
    """Replace launches by calls of the compiled kernels; memory that no kernel writes is NaN."""
    monkeypatch.setattr(
        launch.PROGRAM,
        "load",
        lambda variant: programs.load(launch.PROGRAM, variant.dtype, variant.options),
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def check_gradients(x, bounds=None):
    """Compare the results and the gradients of r, k, v, w, u and the state with float64."""
    found, wanted = with_float64(
        lambda *y: wkv6_cuda(*y, bounds), lambda *y: wkv6_recurrence(*y, bounds), *x
    )
    dtype = x[0].dtype
    check(found[:2], wanted[:2], RECURRENCE[dtype])
    check(found[2:], wanted[2:], RECURRENCE[dtype] if dtype != FP32 else GRADIENT[dtype])


@pytest.mark.parametrize(
    ("T", "B", "H", "K", "V", "dtype"),
    [
        (1, 2, 1, 64, 64, BF16),
        (35, 1, 2, 64, 64, BF16),
        (20, 2, 1, 32, 64, FP16),
        (17, 1, 1, 128, 32, FP32),
    ],
)
def test_results_and_gradients(T, B, H, K, V, dtype):
    x = [*wkv6_inputs(T, B, H, K, V, dtype=dtype), torch.randn(B, H, K, V)]
    check_gradients(x)


def test_results_beyond_fp16_are_infinite_and_no_others():
    inputs = partial(wkv6_inputs, K=64, V=64, dtype=FP16)
    check_fp16_range(WKV6._replace(call=wkv6_cuda, inputs=inputs), 16)


def test_packed_sequences():
    lengths = [0, 1, 19, 0, 8, 0]
    x = [*wkv6_inputs(sum(lengths), H=1, K=64, V=64, dtype=BF16)]
    x.append(torch.randn(len(lengths), 1, 64, 64))
    check_gradients(x, packed(lengths))


@pytest.mark.parametrize("decay", [0.0, 1e-4, 3.5, 30.0, 1e6])
def test_any_decay_with_its_gradients(decay):
    x = wkv6_inputs(20, H=1, K=128, V=32, decay=decay)
    found, wanted = with_float64(wkv6_cuda, wkv6_recurrence, *x)
    assert all(torch.isfinite(y).all() for y in found)
    check(found[:5], wanted[:5], RECURRENCE[FP32])
    if decay < 10:  # the gradients of stronger decays vanish
        check(found[5:], wanted[5:], RECURRENCE[FP32])


def test_a_decay_to_zero_keeps_later_tokens():
    r, k, v, w, u = wkv6_inputs(20, H=1, K=128, V=32)
    w[:, 5] = float("-inf")
    found, wanted = with_float64(
        wkv6_cuda,
        lambda r, k, v, w, u: wkv6_recurrence(r, k, v, w.clamp(min=-1e6), u),
        *(r, k, v, w, u),
    )
    check(found, wanted, RECURRENCE[FP32])


def test_tokens_one_by_one_with_the_state_in_place():
    x, state = wkv6_inputs(9, H=1, K=64, V=64, dtype=BF16), torch.randn(1, 1, 64, 64)
    wanted, final = wkv6_recurrence(*x, state)
    found = []
    for t in range(9):
        o, after = wkv6_cuda(*(y[:, t : t + 1] for y in x[:4]), x[4], state, in_place=True)
        assert after is state
        found.append(o)
    check((torch.cat(found, 1), state), (wanted, final), RECURRENCE[BF16])


def test_unsupported_calls():
    x = wkv6_inputs(3, K=64, V=64)
    for inputs, words in (
        ([y[..., :48] for y in x], "must have one of 32, 64, 128 channels; they have 48"),
        ([*x[:2], x[2][..., :48], *x[3:]], "a multiple of 32 channels; they have 48"),
        ([y.double() for y in x], "bf16, fp16 or fp32; v is torch.float64"),
    ):
        with pytest.raises(ValueError, match=words):
            wkv6_cuda(*inputs)
    for state in (None, torch.zeros(1, 2, 64, 64, dtype=BF16)):
        with pytest.raises(ValueError, match="in_place needs an initial_state that is fp32"):
            wkv6_cuda(*x, state, in_place=True)
