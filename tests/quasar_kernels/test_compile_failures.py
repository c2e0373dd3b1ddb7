"""compile_failures recognises real messages of compilers and torch.

The messages come from runs of the tools with a planted fault. Messages that need a GPU, another
driver or little memory are quoted.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from fla.ops.quasar import switches
from fla.ops.quasar.cuda import nvrtc

from benchmarks.resources.compile import find_nvcc
from quasar_kernels import compile_failures as known
from quasar_kernels.compile_failures import Explanation, explain
from tests.processes import run
from tests.quasar_kernels.cuda.installed import needs_nvrtc

NVCC = find_nvcc()
KERNEL = 'extern "C" __global__ void k(float* x) { %s }\n'
WGMMA = KERNEL % 'asm volatile("wgmma.fence.sync.aligned;");'
PTX = ".version {}\n.target {}\n.address_size 64\n.visible .entry k() {{ ret; }}\n"

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


@needs_nvcc
@pytest.mark.parametrize(
    ("version", "target", "option", "expected"),
    [
        ("8.0", "sm_80", "sm_199", known.TOOLKIT_OLD),
        ("8.0", "sm_90a", "sm_80", known.ARCH_FLAG),
        ("99.0", "sm_80", "sm_80", known.TOOLKIT_MIXED),
    ],
)
def test_ptxas(version, target, option, expected, tmp_path):
    ptxas = shutil.which("ptxas", path=f"{Path(str(NVCC)).parent}{os.pathsep}{os.environ['PATH']}")
    file = tmp_path / "kernel.ptx"
    file.write_text(PTX.format(version, target))
    text = _output(ptxas, f"-arch={option}", file, "-o", tmp_path / "cubin")
    assert explain(text) == expected, text


@needs_nvrtc
@pytest.mark.parametrize(
    ("source", "arch", "expected"),
    [
        (KERNEL % "", "sm_199", known.TOOLKIT_OLD),
        (WGMMA, "sm_90", known.ARCH_FLAG),
        ("#include <cuda_fp16.h>\n", "sm_90", known.NO_HEADER),
        ('#include "chunk.cuh"\n', "sm_90", known.NO_SOURCE),
        (KERNEL % "no_such_call();", "sm_90", None),
    ],
)
def test_nvrtc(source: str, arch: str, expected: Explanation | None) -> None:
    with pytest.raises(nvrtc.CudaUnavailableError) as caught:
        nvrtc._compile(nvrtc.load_library(), "kernel", source, {}, (f"--gpu-architecture={arch}",))
    assert explain(str(caught.value)) == expected, caught.value


def test_no_nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(switches.NVRTC, str(tmp_path / "libnvrtc.so"))
    with pytest.raises(nvrtc.CudaUnavailableError) as caught:
        nvrtc.load_library.__wrapped__()
    assert explain(str(caught.value)) == known.NO_NVRTC


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sh: 1: nvcc: not found", known.NO_NVCC),
        ("bash: line 1: g++: command not found", known.NO_GCC),
        ("bash: line 1: 7 Killed                  cicc", known.MEMORY),
        ("Loop in catastrophic error processing", known.MEMORY),
        ("nvcc error   : 'cicc' died with status 137", known.MEMORY),
        ("failed to open libnvrtc-builtins.so.13.0", known.NO_NVRTC),
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
