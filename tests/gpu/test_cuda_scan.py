"""The CUDA C++ forward pass on a GPU: accuracy, semantics, delivery, and mixed use with Triton."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from gpu_inputs import (  # noqa: F401
    ADVERSARIAL_KEYS,
    LIMIT,
    H,
    S,
    assert_close,
    common_key,
    fresh,
    layer_like,
)

from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_chunked, quasar_recurrence, relative_rms

mount()

from fla.ops.quasar import chunk_quasar, cuda_scan, nvrtc  # noqa: E402
from fla.ops.quasar.backend import choose_backend  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
        reason="needs compute capability 8.0",
    ),
]

PORTABLE = ("-DQUASAR_NO_WGMMA",)
"""Compiler options that take wgmma from a Hopper GPU: what runs elsewhere."""


@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 127, 512, 1000, 4096, 65_537, 1_000_000])
def test_output_matches_float64(T):
    inputs = layer_like(T)
    oracle = quasar_recurrence if T <= 512 else quasar_chunked
    expected, state = oracle(*inputs)
    result = cuda_scan.forward(*inputs, output_final_state=True)
    assert_close(result.o, expected, LIMIT[torch.bfloat16])
    assert relative_rms(result.final_state, state) <= LIMIT[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("B", "heads"), [(1, 8), (2, 3), (5, 1)])
def test_every_dtype_batch_and_head_count(dtype, B, heads):
    inputs = layer_like(333, B=B, heads=heads, dtype=dtype)
    initial = torch.randn(B, heads, S, S, device="cuda")
    expected, state = quasar_recurrence(*inputs, initial)
    result = cuda_scan.forward(*inputs, initial, True, 0.5)
    assert_close(result.o, 0.5 * expected, LIMIT[dtype])
    assert relative_rms(result.final_state, state) <= LIMIT[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_of_older_gpus(dtype):
    inputs = layer_like(5001, dtype=dtype)
    expected, state = quasar_chunked(*inputs)
    result = cuda_scan.forward(*inputs, output_final_state=True, options=PORTABLE)
    assert_close(result.o, expected, LIMIT[dtype])
    assert relative_rms(result.final_state, state) <= LIMIT[dtype]


@pytest.mark.parametrize("T", [1000, 20_000, 200_000])
@pytest.mark.parametrize("noise", [0.1, 0.01])
def test_correlated_keys(noise, T):
    q, k, v, beta = layer_like(T)
    k = common_key(k, noise)
    o = cuda_scan.forward(q, k, v, beta).o
    assert relative_rms(o, quasar_chunked(q, k, v, beta)[0]) <= 9e-3


@pytest.mark.parametrize(
    ("keys", "limit"),
    [
        ("constant", 6e-2),
        ("alternating", 6e-2),
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
    o = cuda_scan.forward(q, k, v, beta).o
    assert torch.isfinite(o).all()
    assert relative_rms(o, quasar_chunked(q, k, v, beta)[0]) <= limit


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_values_of_any_size_that_bf16_holds(size):
    q, k, v, beta = layer_like(1500)
    v = (v.float() * size).bfloat16()
    o = cuda_scan.forward(q, k, v, beta).o
    assert relative_rms(o, quasar_chunked(q, k, v, beta)[0]) <= 6e-3


def test_the_future_does_not_reach_the_past():
    q, k, v, beta = layer_like(5000)
    before = cuda_scan.forward(q, k, v, beta).o
    cut = 3210
    for x in (q, k, v):
        x[:, cut:] = torch.randn_like(x[:, cut:])
    after = cuda_scan.forward(q, k, v, beta).o
    assert torch.equal(before[:, :cut], after[:, :cut])
    assert not torch.equal(before[:, cut:], after[:, cut:])


def test_the_number_of_segments_changes_the_rounding_only():
    inputs = layer_like(6000)
    expected, _ = quasar_chunked(*inputs)
    for n in (1, 2, 7, 50, 94):
        result = cuda_scan.forward(*inputs, segments=n)
        assert (result.G is None) == (n == 1)
        assert_close(result.o, expected, LIMIT[torch.bfloat16])


def test_states_are_those_behind_the_segments():
    q, k, v, beta = layer_like(1000)
    result = cuda_scan.forward(q, k, v, beta, segments=4)
    length, total = result.segments.length, result.segments.total
    assert total == 4
    for n in range(total - 1):
        stop = (n + 1) * length
        state = quasar_chunked(q[:, :stop], k[:, :stop], v[:, :stop], beta)[1]
        assert relative_rms(result.states[n : n + 1], state) <= 6e-3
        # G takes any state through its segment: the difference that an initial state makes
        start = torch.randn(1, H, S, S, device="cuda")
        part = [x[:, stop - length : stop] for x in (q, k, v)]
        moved = quasar_chunked(*part, beta, start)[1] - quasar_chunked(*part, beta)[1]
        assert relative_rms(result.G[n : n + 1] @ start, moved) <= 6e-3


def test_reruns_are_bitwise_equal_and_inputs_stay():
    inputs = layer_like(70_000)
    copies = [x.clone() for x in inputs]
    first, second = (cuda_scan.forward(*inputs, output_final_state=True) for _ in range(2))
    assert torch.equal(first.o, second.o)
    assert torch.equal(first.final_state, second.final_state)
    assert all(torch.equal(x, c) for x, c in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("lengths", [[0, 1, 700, 0, 64, 9000, 65, 0], [5], [0, 0], [16] * 50])
def test_packed_sequences_equal_separate_calls(lengths):
    q, k, v, beta = layer_like(max(sum(lengths), 1))
    initial = torch.randn(len(lengths), H, S, S, device="cuda")
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device="cuda")
    result = cuda_scan.forward(q, k, v, beta, initial, True, 1.0, cu)
    start = 0
    for n, length in enumerate(lengths):
        part = [x[:, start : start + length] for x in (q, k, v)]
        expected, state = quasar_chunked(*part, beta, initial[n : n + 1])
        if length:
            assert relative_rms(result.o[:, start : start + length], expected) <= 6e-3
        assert relative_rms(result.final_state[n : n + 1], state) <= 6e-3
        start += length


def test_two_halves_with_the_state_carried_equal_the_whole():
    q, k, v, beta = layer_like(4001)
    expected, end = quasar_chunked(q, k, v, beta)
    head, tail = ([x[:, part] for x in (q, k, v)] for part in (slice(1777), slice(1777, None)))
    first = cuda_scan.forward(*head, beta, None, True)
    second = cuda_scan.forward(*tail, beta, first.final_state, True)
    assert_close(torch.cat([first.o, second.o], 1), expected, LIMIT[torch.bfloat16])
    assert relative_rms(second.final_state, end) <= 6e-3


def test_strided_inputs_need_no_copy():
    q, k, v, beta = layer_like(900)
    wide = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    views = [x.unflatten(-1, (H, S)) for x in wide.split(H * S, -1)]
    assert not views[0].is_contiguous()
    assert torch.equal(cuda_scan.forward(*views, beta).o, cuda_scan.forward(q, k, v, beta).o)


def test_more_elements_than_32_bits_count():
    T = (1 << 31) // (H * S) + 5000
    q, k, v = (torch.randn(1, T, H, S, device="cuda", dtype=torch.bfloat16) * 0.3 for _ in range(3))
    beta = torch.ones(H, device="cuda")
    o = cuda_scan.forward(q, k, v, beta).o
    # what is far behind is forgotten: the last tokens from a fresh start, compared at their end
    tail = slice(T - 12_000, T)
    expected, _ = quasar_chunked(q[:, tail], k[:, tail], v[:, tail], beta)
    assert relative_rms(o[:, -2000:], expected[:, -2000:]) <= 6e-3


def _gradients(inputs, initial, cu, do, d_state):
    leaves = [x.detach().requires_grad_() for x in (*inputs, initial)]
    o, final = chunk_quasar(*leaves, True, cu)
    torch.autograd.backward([o, final], [do, d_state])
    return [x.grad for x in leaves]


@pytest.mark.parametrize("packed", [False, True])
def test_triton_gradients_follow_the_cuda_forward_pass(packed, monkeypatch):
    inputs = layer_like(3000)
    cu = torch.tensor([0, 1000, 1000, 3000], device="cuda") if packed else None
    initial = torch.randn(3 if packed else 1, H, S, S, device="cuda")
    do, d_state = torch.randn_like(inputs[0]), torch.randn_like(initial)
    found = {}
    for name in ("cuda", "triton"):
        monkeypatch.setenv("QUASAR_BACKEND", name)
        assert choose_backend(*inputs[:3]).backend == name
        found[name] = _gradients(inputs, initial, cu, do, d_state)
    wide = [x.detach().double().requires_grad_() for x in (*inputs, initial)]
    torch.autograd.backward(list(quasar_chunked(*wide, cu)), [do.double(), d_state.double()])
    for mixed, triton, exact in zip(found["cuda"], found["triton"], wide, strict=True):
        limit = 1e-2 if exact.ndim > 1 else 3e-2  # beta's terms cancel over all tokens
        assert relative_rms(mixed, exact.grad) <= limit
        assert relative_rms(mixed, triton) <= limit


def test_the_backend_is_used_and_can_be_chosen(monkeypatch):
    inputs = layer_like(300)
    calls = []
    run = cuda_scan.forward
    monkeypatch.setattr(cuda_scan, "forward", lambda *args: calls.append(1) or run(*args))
    monkeypatch.delenv("QUASAR_BACKEND", raising=False)
    assert choose_backend(*inputs[:3]).backend == "cuda"
    chunk_quasar(*inputs)
    assert calls == [1]
    monkeypatch.setenv("QUASAR_BACKEND", "triton")
    chunk_quasar(*inputs)
    assert calls == [1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.float(), "bf16 or fp16"),
        (lambda x: x[..., :32], "64 channels"),
        (lambda x: x[:, :0], "no tokens"),
        (lambda x: x.mT.contiguous().mT, "contiguous"),
        (lambda x: F.pad(x.flatten(), (1, 0))[1:].view_as(x), "multiples of 16 bytes"),
    ],
    ids=["fp32", "narrow", "empty", "strided", "unaligned"],
)
def test_what_the_kernels_do_not_take_goes_to_triton(change, reason):
    q, k, v, beta = layer_like(100)
    q, k, v = change(q), change(k), change(v)
    choice = choose_backend(q, k, v)
    assert choice.backend == "triton"
    assert reason in choice.reason
    o, _ = chunk_quasar(q, k, v, beta)
    if q.numel():
        assert relative_rms(o, quasar_recurrence(q, k, v, beta)[0]) <= 6e-3


def test_a_graph_replays_the_kernels():
    q, k, v, beta = layer_like(2000)
    cuda_scan.forward(q, k, v, beta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = cuda_scan.forward(q, k, v, beta).o
    for x in (q, k, v):
        x.copy_(x.flip(1))
    graph.replay()
    assert torch.equal(o, cuda_scan.forward(q, k, v, beta).o)


def test_a_side_stream_and_another_thread():
    inputs = layer_like(1000)
    expected = cuda_scan.forward(*inputs).o
    found = []

    def work():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            found.append(cuda_scan.forward(*inputs).o)
        stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


FRESH = """
import shutil, torch
from quasar_kernels.mount import mount
mount()
from fla.ops.quasar import chunk_quasar, cuda_scan
from fla.ops.quasar.backend import choose_backend
assert not any(map(shutil.which, ("nvcc", "g++", "gcc", "cc", "ninja")))
torch.manual_seed(0)
q, k, v = (torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16) * 0.3 for _ in range(3))
beta = torch.ones(2, device="cuda")
print(choose_backend(q, k, v).backend, cuda_scan.forward(q, k, v, beta).o.float().sum().item())
"""


def _start(tmp_path, code=FRESH, **variables):
    environment = {**os.environ, "PATH": str(tmp_path), nvrtc.CACHE: str(tmp_path / "cache")}
    environment.pop("QUASAR_BACKEND", None)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_without_compilers_build_at_once(tmp_path):
    processes = [_start(tmp_path) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    first, second = (out for out, _ in results)
    assert first == second
    assert first.startswith("cuda ")
    assert len(list((tmp_path / "cache").iterdir())) == 1


WITHOUT = """
import torch
from quasar_kernels.mount import mount
mount()
from fla.ops.quasar import chunk_quasar
from fla.ops.quasar.backend import choose_backend
q, k, v = (torch.randn(1, 99, 2, 64, device="cuda", dtype=torch.bfloat16) * 0.3 for _ in range(3))
for _ in range(3):
    o, _ = chunk_quasar(q, k, v, torch.ones(2, device="cuda"))
assert torch.isfinite(o).all()
print(choose_backend(q, k, v).backend)
"""


def test_without_nvrtc_triton_runs_and_says_so_once(tmp_path):
    process = _start(
        tmp_path, WITHOUT, QUASAR_NVRTC=str(tmp_path / "none.so"), PATH=os.environ["PATH"]
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == "triton\n"
    assert err.count("the CUDA kernels are not used, Triton serves: NVRTC") == 1
