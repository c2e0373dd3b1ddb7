"""The CUDA recurrence, built by nvcc and launched on a GPU, against float64."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch

from quasar_kernels.contract import OVERLAY
from quasar_kernels.reference import quasar_recurrence, relative_rms

pytestmark = pytest.mark.gpu

SOURCE = OVERLAY / "fla/ops/quasar/cuda/scan/csrc/recurrent.cu"
LAUNCHER = """
#include "{source}"
#include <cstdint>
extern "C" int launch_{name}(void** p, long long T, int H, int sequences, void* stream) {{
  {name}<<<sequences * H, {width}, 0, (cudaStream_t)stream>>>(
      (const {scalar}*)p[0], (const {scalar}*)p[1], (const {scalar}*)p[2], (const float*)p[3],
      (const float*)p[4], (float*)p[5], (const long long*)p[6], ({scalar}*)p[7], T, H);
  return (int)cudaGetLastError();
}}
"""


def build(folder, name, scalar, width):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on PATH")
    (folder / "launch.cu").write_text(
        LAUNCHER.format(source=SOURCE, name=name, scalar=scalar, width=width)
    )
    command = [nvcc, "-shared", "-Xcompiler", "-fPIC", "-arch=native", "launch.cu", "-o", "l.so"]
    subprocess.run(command, cwd=folder, check=True)
    return getattr(ctypes.CDLL(str(folder / "l.so")), f"launch_{name}")


@pytest.mark.parametrize(
    ("dtype", "scalar", "limit"),
    [
        (torch.float32, "float", 2e-6),
        (torch.float16, "__half", 5e-4),
        (torch.bfloat16, "__nv_bfloat16", 3e-3),
    ],
)
@pytest.mark.parametrize("width", [32, 64])
def test_recurrence_in_cuda(tmp_path, dtype, scalar, limit, width):
    suffix = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    launch = build(tmp_path, f"quasar_recurrent_{suffix}_s{width}", scalar, width)
    H, bounds = 3, [0, 100, 100, 257]
    T, N = bounds[-1], len(bounds) - 1
    q, k, v = (torch.randn(1, T, H, width, device="cuda").mul(0.4).to(dtype) for _ in range(3))
    beta = torch.rand(H, device="cuda") + 0.5
    initial = torch.randn(N, H, width, width, device="cuda")
    cu = torch.tensor(bounds, dtype=torch.int64, device="cuda")
    o, final = torch.full_like(q, float("nan")), torch.full_like(initial, float("nan"))
    pointers = (ctypes.c_void_p * 8)(
        *(x.data_ptr() for x in (q, k, v, beta, initial, final, cu, o))
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert launch(pointers, ctypes.c_longlong(T), H, N, stream) == 0
    torch.cuda.synchronize()
    expected, state = quasar_recurrence(q, k, v, beta, initial, cu)
    assert relative_rms(o, expected) <= limit
    assert relative_rms(final, state) <= limit
