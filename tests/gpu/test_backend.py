"""The choice of the implementation on a GPU, and compilation on a machine without compilers."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar import chunk_quasar, fused_recurrent_quasar, switches
from fla.ops.quasar.backend import choose_backend
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.operator_types import ScanInputs
from torch.autograd import forward_ad

from quasar_kernels.reference import quasar_recurrence, relative_rms
from tests.gpu.calls import ON_CUDA_KERNELS, layer_like
from tests.processes import HANG
from tests.quasar_kernels.tolerances import OPERATOR

pytestmark = ON_CUDA_KERNELS


@pytest.mark.parametrize("width", cuda_scan.HEAD_DIMS)
def test_the_cuda_kernels_are_the_default_and_triton_can_be_chosen(width, monkeypatch):
    inputs = layer_like(300, H=2, S=width)
    calls = []
    run = cuda_scan.forward
    monkeypatch.setattr(
        cuda_scan, "forward", lambda *args, **kw: calls.append(1) or run(*args, **kw)
    )
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
        (lambda x: x[..., :32], "64 or 128 channels"),
        (lambda x: x[:, :0], "no tokens"),
        (lambda x: x.mT.contiguous().mT, "contiguous"),
        (lambda x: F.pad(x.flatten(), (1, 0))[1:].view_as(x), "multiples of 16 bytes"),
        (lambda x: x[:, :, :1].expand_as(x), "expanded"),
    ],
    ids=["fp32", "narrow", "empty", "strided", "unaligned", "expanded"],
)
def test_triton_computes_unsupported_calls(change, reason):
    q, k, v, beta = layer_like(100)
    q, k, v = change(q), change(k), change(v)
    choice = choose_backend(q, k, v)
    assert choice.backend == "triton"
    assert reason in choice.reason
    o, _ = chunk_quasar(q, k, v, beta)
    if q.numel():
        assert relative_rms(o, quasar_recurrence(q, k, v, beta)[0]) <= OPERATOR[torch.bfloat16]


def test_derivatives_in_forward_mode_raise_an_error():
    q, k, v, beta = layer_like(300)
    layer = QuasarAttention(hidden_size=64, head_dim=64, num_heads=1).cuda()
    x = torch.randn(1, 20, 64, device="cuda")
    calls = (
        (lambda q: chunk_quasar(q, k, v, beta), q),
        (lambda q: fused_recurrent_quasar(q, k, v, beta), q),
        (layer, x),
    )
    for call, y in calls:
        for context in (torch.no_grad, torch.enable_grad):
            with context(), forward_ad.dual_level(), pytest.raises(NotImplementedError):
                call(forward_ad.make_dual(y.detach(), y.detach()))


def test_another_stream_and_thread():
    inputs = layer_like(1000)
    expected = cuda_scan.forward(ScanInputs.of(*inputs)).o
    found = []

    def work():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            found.append(cuda_scan.forward(ScanInputs.of(*inputs)).o)
        stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


FRESH = """
import shutil, torch
from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_recurrence, relative_rms
mount()
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.operator_types import ScanInputs
from fla.ops.quasar.backend import choose_backend
assert not any(map(shutil.which, ("nvcc", "g++", "gcc", "cc", "ninja")))
torch.manual_seed(0)
q, k, v = (torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16) * 0.3 for _ in range(3))
beta = torch.ones(2, device="cuda")
o = cuda_scan.forward(ScanInputs.of(q, k, v, beta)).o
assert relative_rms(o, quasar_recurrence(q, k, v, beta)[0]) <= 6e-3
print(choose_backend(q, k, v).backend, o.float().sum().item())
"""


def _start(tmp_path, code=FRESH, **variables):
    environment = {**os.environ, "PATH": str(tmp_path), switches.CACHE_DIR: str(tmp_path / "cache")}
    environment.pop("QUASAR_BACKEND", None)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_compile_concurrently_by_nvrtc(tmp_path):
    processes = [_start(tmp_path) for _ in range(2)]
    results = [process.communicate(timeout=HANG) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    first, second = (out for out, _ in results)
    assert first == second
    assert first.startswith("cuda ")
    assert len(list((tmp_path / "cache").iterdir())) == 1


WITHOUT = """
import torch
from quasar_kernels.mount import mount
mount()
from fla.ops.quasar import chunk_quasar, switches
from fla.ops.quasar.backend import choose_backend
q, k, v = (torch.randn(1, 99, 2, 64, device="cuda", dtype=torch.bfloat16) * 0.3 for _ in range(3))
for _ in range(3):
    o, _ = chunk_quasar(q, k, v, torch.ones(2, device="cuda"))
assert torch.isfinite(o).all()
print(choose_backend(q, k, v).backend)
"""


def test_without_nvrtc_triton_runs_and_one_line_is_logged(tmp_path):
    process = _start(
        tmp_path, WITHOUT, QUASAR_NVRTC=str(tmp_path / "none.so"), PATH=os.environ["PATH"]
    )
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    assert out == "triton\n"
    assert err.count("the CUDA kernels are not used, Triton serves: NVRTC") == 1
