"""compile_failures recognises real messages of compilers and torch.

nvcc runs with planted faults. Messages of other tools, and those that need a GPU, another driver or
little memory, are quoted.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchmarks.resources.compile import find_nvcc
from quasar_kernels import compile_failures as known
from quasar_kernels.compile_failures import Explanation, explain
from tests.processes import run

NVCC = find_nvcc()
KERNEL = 'extern "C" __global__ void k(float* x) { %s }\n'
WGMMA = KERNEL % 'asm volatile("wgmma.fence.sync.aligned;");'
needs_nvcc = pytest.mark.skipif(
    NVCC is None or shutil.which("g++") is None, reason="needs nvcc and g++"
)


def _output(*command: object) -> str:
    """Run a command that must fail; return its output."""
    done = run(*command, env={**os.environ, "LC_ALL": "C"})
    assert done.returncode
    return done.stdout + done.stderr


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        (KERNEL % "", ["-arch=sm_199"], known.TOOLKIT_OLD),
        (KERNEL % "", ["-gencode", "arch=compute_20,code=sm_20"], known.TOOLKIT_OLD),
        (WGMMA, ["-arch=sm_90"], known.ARCH_FLAG),
        (KERNEL % 'asm volatile("cp.async.wait_all;");', ["-arch=sm_75"], known.ARCH_FLAG),
        ("#include <cuda_no_such.h>\n", ["-arch=sm_90"], known.NO_HEADER),
        ('#include "fragments.cuh"\n', ["-arch=sm_90"], known.NO_SOURCE),
        ("#include <Python.h>\n", ["-arch=sm_90"], known.NO_PYTHON_H),
        (KERNEL % "", ["-arch=sm_90", "-U__GNUC__", "-D__GNUC__=99"], known.GCC_NEW),
        (KERNEL % "", ["-arch=sm_90", "-ccbin", "/nonexistent/g++"], known.NO_GCC),
        (KERNEL % "no_such_call();", ["-arch=sm_90"], None),
    ],
    ids=lambda x: x.cause if isinstance(x, Explanation) else "",
)
def test_nvcc(
    source: str, options: list[str], expected: Explanation | None, tmp_path: Path
) -> None:
    file = tmp_path / "kernel.cu"
    file.write_text(source)
    text = _output(NVCC, "-cubin", *options, file, "-o", tmp_path / "kernel.cubin")
    assert explain(text) == expected, text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sh: 1: nvcc: not found", known.NO_NVCC),
        ("bash: line 1: g++: command not found", known.NO_GCC),
        ("bash: line 1: 7 Killed                  cicc", known.MEMORY),
        ("Loop in catastrophic error processing", known.MEMORY),
        ("nvcc error   : 'cicc' died with status 137", known.MEMORY),
        ("ptxas fatal   : Value 'sm_199' is not defined for option 'gpu-name'", known.TOOLKIT_OLD),
        ("SM version specified by .target is higher than default SM version", known.ARCH_FLAG),
        ("fatal   : Unsupported .version 99.0; current version is '9.0'", known.TOOLKIT_MIXED),
        ("nvrtc: error: invalid value for --gpu-architecture (-arch)", known.TOOLKIT_OLD),
        ("Instruction 'wgmma.fence' not supported on .target 'sm_90'", known.ARCH_FLAG),
        ('catastrophic error: could not open source file "cuda_fp16.h"', known.NO_HEADER),
        ('catastrophic error: cannot open source file "chunk.cuh"', known.NO_SOURCE),
        ("failed to open libnvrtc-builtins.so.13.0", known.NO_NVRTC),
        ("NVRTC, CUDA's run-time compiler, was not found", known.NO_NVRTC),
        ("cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU", known.OTHER_GPUS),
        ("the provided PTX was compiled with an unsupported toolchain.", known.DRIVER_OLD),
        ("cudaGetDeviceCount() failed with error code: 35", known.DRIVER_OLD),
        ("The NVIDIA driver on your system is too old (found version 11040).", known.DRIVER_OLD),
        ("Error 803: system has unsupported display driver", known.DRIVER_MIXED),
        ("RuntimeError: Found no NVIDIA driver on your system.", known.DRIVER_MISSING),
        ("the CUDA driver (libcuda.so.1) cannot be loaded", known.DRIVER_MISSING),
        ("AssertionError: Torch not compiled with CUDA enabled", known.CPU_TORCH),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", known.GPU_FULL),
        ("[Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'", known.NO_NVCC),
        ("Failed to find C compiler. Please specify via CC environment variable", known.NO_GCC),
        ("the CUDA sources cannot be read ([Errno 2] chunk.cuh)", known.NO_SOURCE),
        ("sequence lengths 137, 803 and 222 were timed in 35 s", None),
    ],
)
def test_quoted_messages(text: str, expected: Explanation | None) -> None:
    assert explain(text) == expected
