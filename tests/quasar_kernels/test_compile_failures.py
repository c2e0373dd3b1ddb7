"""compile_failures recognises messages of compilers, the driver and torch, which are quoted."""

from __future__ import annotations

import pytest

from quasar_kernels import compile_failures as known
from quasar_kernels.compile_failures import Explanation, explain


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bash: line 1: 7 Killed                  cicc", known.MEMORY),
        ("nvcc error   : 'cicc' died with status 137", known.MEMORY),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", known.GPU_FULL),
        ("nvrtc: error: invalid value for --gpu-architecture (-arch)", known.OTHER_GPUS),
        ("cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU", known.OTHER_GPUS),
        ("failed to open libnvrtc-builtins.so.13.0", known.NO_NVRTC),
        ("NVRTC, CUDA's run-time compiler, was not found", known.NO_NVRTC),
        ("the provided PTX was compiled with an unsupported toolchain.", known.DRIVER_OLD),
        ("cudaGetDeviceCount() failed with error code: 35", known.DRIVER_OLD),
        ("The NVIDIA driver on your system is too old (found version 11040).", known.DRIVER_OLD),
        ("Error 803: system has unsupported display driver", known.DRIVER_MIXED),
        ("RuntimeError: Found no NVIDIA driver on your system.", known.DRIVER_MISSING),
        ("the CUDA driver (libcuda.so.1) cannot be loaded", known.DRIVER_MISSING),
        ("AssertionError: Torch not compiled with CUDA enabled", known.CPU_TORCH),
        ("sequence lengths 137, 803 and 222 were timed in 35 s", None),
        ("kernel.cu(3): error: identifier 'x' is undefined", None),
    ],
)
def test_quoted_messages(text: str, expected: Explanation | None) -> None:
    assert explain(text) == expected
