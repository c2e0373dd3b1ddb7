"""WKV6 on a CPU against its definition in float64, and which implementation takes a call."""

from __future__ import annotations

import logging

import pytest
import torch
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

from quasar_kernels.blocks import backends
from quasar_kernels.blocks.wkv6 import OPERATOR as WKV6
from quasar_kernels.blocks.wkv6 import SHORT, wkv6
from quasar_kernels.decay_reference import wkv6_recurrence
from tests.quasar_kernels.blocks.calls import check, results_and_gradients, wkv6_inputs
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import GRADIENT, OPERATOR

LIMIT = OPERATOR[torch.float32]


def test_the_definition_is_the_host_library_s():
    x = wkv6_inputs(9, B=2)
    state = torch.randn(2, 2, 16, 24)
    r, k, v, w, u = x
    turned = (y.transpose(1, 2) for y in (r, k, v, w))
    o, final = naive_recurrent_rwkv6(*turned, u, 1.0, state, True)
    check((o.transpose(1, 2), final), wkv6_recurrence(*x, state), 1e-6)


@pytest.mark.parametrize("T", [0, 1, 3, 64, 130])
def test_results_are_float64_s(T):
    x, state = wkv6_inputs(T, B=2), torch.randn(2, 2, 16, 24)
    check(wkv6(*x, state), wkv6_recurrence(*x, state), LIMIT)


@pytest.mark.parametrize("dtype", OPERATOR)
def test_every_dtype(dtype):
    x = wkv6_inputs(100, dtype=dtype)
    o, final = wkv6(*x)
    assert o.dtype == dtype
    assert final.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    check((o, final), wkv6_recurrence(*x), OPERATOR[dtype])


def test_packed_sequences_equal_separate_ones():
    lengths = [0, 1, 70, 0, 64, 65, 0]
    x, state = wkv6_inputs(sum(lengths)), torch.randn(len(lengths), 2, 16, 24)
    bounds = packed(lengths)
    check(wkv6(*x, state, bounds), wkv6_recurrence(*x, state, bounds), LIMIT)


def test_gradients_are_float64_s():
    x, bounds = [*wkv6_inputs(90), torch.randn(3, 2, 16, 24)], packed([30, 0, 60])
    found = results_and_gradients(lambda *x: wkv6(*x, bounds), x)
    wanted = results_and_gradients(lambda *x: wkv6_recurrence(*x, bounds), x, torch.float64)
    check(found, wanted, GRADIENT[torch.float32])


@pytest.mark.parametrize("decay", [0.0, 1e-4, 30.0, 1000.0, 1e6])
def test_any_decay_with_its_gradients(decay):
    x = wkv6_inputs(150, decay=decay)
    found = results_and_gradients(wkv6, x)
    check(found[:5], results_and_gradients(wkv6_recurrence, x, torch.float64)[:5], LIMIT)
    assert all(torch.isfinite(y).all() for y in found)


def test_one_strong_decay_costs_its_neighbours_no_digits():
    r, k, v, w, u = wkv6_inputs(128, decay=0.01)
    w[:, 5::20] = -1e6
    check(wkv6(r, k, v, w, u), wkv6_recurrence(r, k, v, w, u), LIMIT)
    w[:, 50] = float("-inf")
    o, _ = wkv6(r, k, v, w, u)
    alone, _ = wkv6(*(y[:, 50:] for y in (r, k, v, w)), u)
    assert torch.isfinite(o).all()
    check([o[:, 51:]], [alone[:, 1:]], LIMIT)


def test_what_does_not_fit_is_refused():
    r, k, v, w, u = wkv6_inputs(10, B=2)
    for arguments, words in (
        ((r[0], k, v, w, u), r"r must have shape \[B, T, H, K\]"),
        ((r, k[:, 1:], v, w, u), "k must have shape"),
        ((r, k, v[:, 1:], w, u), "v must have shape"),
        ((r, k, v, w[..., :1], u), "w must have shape"),
        ((r, k, v, w, u[:1]), "u must have shape"),
        ((r, k, v, w, u, torch.zeros(1, 2, 16, 24)), "one state a sequence"),
        ((r, k, v, w, u, None, packed([10])), "B must be 1"),
        ((None, k, v, w, u), r"r must have shape \[B, T, H, K\]; got NoneType, no tensor"),
        ((r, k, None, w, u), r"v must have shape \[2, 10, 2, V\]; got NoneType"),
        ((r, k, v.long(), w, u), "v must be bf16, fp16, fp32 or fp64; got torch.int64"),
        ((r, k, v, w.to(torch.complex64), u), "w must be bf16"),
        ((r, k, v, w, u.to("meta")), "u must be on cpu, like the other arguments; got meta"),
        ((r, k, v, w, u, torch.zeros(2, 2, 16, 24, device="meta")), "sequence, must be on cpu"),
    ):
        with pytest.raises(ValueError, match=words):
            wkv6(*arguments)
    row = [y.reshape(1, 20, *y.shape[2:]) for y in (r, k, v, w)]
    for bounds, words in (
        (packed([10]), "must rise from 0 to T = 20"),
        ([0, 20], "int32 or int64 tensor .* got list"),
        (torch.tensor([0.0, 20.0]), "int32 or int64 tensor"),
        (torch.tensor(20), r"shape \[N \+ 1\], from 0 to T; got \[\]"),
        (torch.tensor([[0, 20]]), r"shape \[N \+ 1\], from 0 to T; got \[1, 2\]"),
        (packed([])[:0], "got .0."),
    ):
        with pytest.raises(ValueError, match=words):
            wkv6(*row, u, None, bounds)


def test_the_host_s_kernels_are_called_as_they_ask(monkeypatch):
    """Only a GPU runs them: here their place is taken by the host's definition."""

    def chunk_rwkv6(r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens):
        assert cu_seqlens is None
        turned = (y.transpose(1, 2) for y in (r, k, v, w))
        o, final = naive_recurrent_rwkv6(*turned, u, scale, initial_state, output_final_state)
        return o.transpose(1, 2), final

    monkeypatch.setattr("fla.ops.rwkv6.chunk_rwkv6", chunk_rwkv6)
    x, state = wkv6_inputs(20), torch.randn(1, 2, 16, 24)
    check(WKV6.named("fla-core").call(*x, state, None), wkv6_recurrence(*x, state), LIMIT)


GPU = torch.device("cuda")


def test_a_backend_says_why():
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    assert WKV6.backend(cpu, bf16) == ("torch", "the tensors are not on a GPU", "")
    assert WKV6.backend(GPU, bf16, width=128).name == "triton"
    assert WKV6.backend(GPU, bf16, width=256) == (
        "fla-core",
        "cuda takes heads of 32, 64 or 128 channels; triton takes heads of up to 128 channels",
        "",
    )
    assert WKV6.backend(GPU, torch.float64).reason == "the kernels have no fp64"


def test_short_calls_go_to_cuda_and_others_to_triton(monkeypatch):
    def found(**call):
        return WKV6.backend(GPU, torch.bfloat16, width=64, **call)

    assert {found(tokens=n).name for n in SHORT} == {"cuda"}
    other = ("triton", "cuda is for calls of 2 to 16 tokens", "")
    assert found(tokens=SHORT[-1] + 1) == found() == found(tokens=1) == other
    assert found(tokens=2, values=48).name == "triton"
    monkeypatch.setenv("QUASAR_BACKEND", "triton")
    assert found(tokens=2) == ("triton", "QUASAR_BACKEND=triton", "")
    monkeypatch.setenv("QUASAR_BACKEND", "auto")
    monkeypatch.setenv("QUASAR_WKV6_BACKEND", "cuda")
    assert found(tokens=100_000).name == "cuda"


def test_kernels_that_fail_leave_the_call_to_the_next_with_one_line(monkeypatch, caplog):
    def broken(*_):
        raise CudaUnavailableError("no NVRTC", "install it")

    kernels = [WKV6.named("cuda")._replace(call=broken)]
    kernels.append(backends.Kernels("triton", "math", "", lambda *x: x))
    operator = backends.Operator("WKV6", kernels, broken)
    like = torch.zeros(1).as_subclass(OnGPU)
    for _ in range(2):
        assert operator(like, False, 1, 2, width=64, tokens=2) == (1, 2)
    (line,) = caplog.messages
    assert line.startswith("WKV6 runs on triton: cuda failed: CudaUnavailableError no NVRTC; ")
    assert "remedy: install it; fix the named cause" in line


def test_the_environment_s_torch_is_taken(monkeypatch):
    monkeypatch.setenv("QUASAR_BACKEND", "torch")
    assert WKV6.backend(GPU, torch.bfloat16) == ("torch", "QUASAR_BACKEND=torch", "")


def test_the_operator_s_own_variable_names_one_implementation(monkeypatch):
    monkeypatch.setenv("QUASAR_WKV6_BACKEND", "fla-core")
    assert WKV6.backend(GPU, torch.bfloat16, width=64).name == "fla-core"
    monkeypatch.setenv("QUASAR_WKV6_BACKEND", "triton")
    wide = WKV6.backend(GPU, torch.bfloat16, width=256)
    assert wide == ("torch", "triton takes heads of up to 128 channels", "")
    monkeypatch.setenv("QUASAR_WKV6_BACKEND", "torch")
    assert WKV6.backend(GPU, torch.bfloat16) == ("torch", "QUASAR_WKV6_BACKEND=torch", "")
    monkeypatch.setenv("QUASAR_WKV6_BACKEND", "fla")
    with pytest.raises(
        ValueError, match="'fla'; set it to one of auto, cuda, triton, fla-core, torch"
    ):
        WKV6.backend(GPU, torch.bfloat16)


class OnGPU(torch.Tensor):
    """A tensor of this machine that says it lies on a GPU."""

    device = GPU


def test_a_kernel_that_fails_is_told_once_and_torch_serves(caplog):
    def broken(*_):
        raise RuntimeError("no kernel image\nat line 1")

    kernels = [
        backends.Kernels("absent", "no_such_library", "pip install it", broken),
        backends.Kernels("broken", "math", "", broken),
    ]
    operator = backends.Operator("X", kernels, lambda x: (x, x))
    like = torch.zeros(1).as_subclass(OnGPU)
    assert operator.backend(GPU, like.dtype).name == "broken"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert operator(like, False, 1) == (1, 1)
    (line,) = caplog.messages
    assert line.startswith("X runs in torch: absent: ModuleNotFoundError: No module named 'no_su")
    assert "broken failed: RuntimeError no kernel image; pip install it; or fix" in line
    assert "\n" not in line


def test_a_call_that_nothing_computes_costs_no_kernel_its_place():
    """Bounds that do not fit are found by whoever reads them, kernels first."""

    def compute(x):
        if x < 0:
            raise ValueError("the call is wrong")
        return x, x

    operator = backends.Operator("X", [backends.Kernels("a", "math", "", compute)], compute)
    like = torch.zeros(1).as_subclass(OnGPU)
    with pytest.raises(ValueError, match="the call is wrong"):
        operator(like, False, -1)
    assert operator.backend(GPU, torch.float32).name == "a"
    assert operator(like, False, 1) == (1, 1)


def test_a_call_without_tokens_asks_no_kernel():
    def broken(*_):
        raise AssertionError

    operator = backends.Operator("X", [backends.Kernels("a", "math", "", broken)], lambda x: (x, x))
    assert operator(torch.zeros(0).as_subclass(OnGPU), False, 1) == (1, 1)
    assert operator.backend(GPU, torch.float32).name == "a"


def test_memory_that_runs_out_is_no_reason_to_fall_back():
    def full(*_):
        raise torch.OutOfMemoryError("full")

    operator = backends.Operator("X", [backends.Kernels("a", "math", "", full)], full)
    with pytest.raises(torch.OutOfMemoryError):
        operator(torch.zeros(1).as_subclass(OnGPU), False)
    assert operator.backend(GPU, torch.float32).name == "a"
