"""compile_failures recognises real messages of compilers and torch.

The messages come from runs of the tools with a planted fault. Messages that need a GPU or another
driver are quoted.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from fla.ops.quasar import switches
from fla.ops.quasar.cuda import nvrtc

from benchmarks.resources.compile import find_nvcc
from quasar_kernels import compile_failures as known
from quasar_kernels.compile_failures import Explanation, explain
from tests import PROJECT
from tests.processes import run
from tests.quasar_kernels.cuda.installed import needs_nvrtc
from tests.small_fla import install_small_fla

NVCC = find_nvcc()
KERNEL = 'extern "C" __global__ void k(float* x) { %s }\n'
WGMMA = KERNEL % 'asm volatile("wgmma.fence.sync.aligned;");'
HEAVY = "".join(
    f'extern "C" __global__ void k{i}(float* x) {{'
    + "".join(f"x[{j}] += x[{i + j}] * {j};" for j in range(600))
    + "}\n"
    for i in range(120)
)
PTX = ".version {}\n.target {}\n.address_size 64\n.visible .entry k() {{ ret; }}\n"

needs_nvcc = pytest.mark.skipif(
    NVCC is None or shutil.which("g++") is None, reason="needs nvcc and g++"
)


def _output(command: list[str], memory: int = 0, **environment: Any) -> str:
    """Run a command that must fail, with limited address space if `memory`; return its output."""

    def limit() -> None:
        if memory:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    environ = {**os.environ, "LC_ALL": "C", **environment}
    done = run(*command, env=environ, preexec_fn=limit)
    assert done.returncode
    return done.stdout + done.stderr


def _nvcc(folder: Path, source: str, *options: str, memory: int = 0, **environment: Any) -> str:
    file = folder / "kernel.cu"
    file.write_text(source)
    command = [str(NVCC), "-cubin", *options, str(file), "-o", str(folder / "kernel.cubin")]
    return _output(command, memory, **environment)


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
    ],
    ids=lambda x: x.cause if isinstance(x, Explanation) else "",
)
def test_nvcc(source: str, options: list[str], expected: Explanation, tmp_path: Path) -> None:
    text = _nvcc(tmp_path, source, *options)
    assert explain(text) == expected, text


@needs_nvcc
def test_nvcc_without_memory(tmp_path: Path) -> None:
    assert explain(_nvcc(tmp_path, HEAVY, "-arch=sm_90", memory=200 << 20)) == known.MEMORY


@needs_nvcc
def test_an_error_in_the_code_has_no_explanation(tmp_path: Path) -> None:
    text = _nvcc(tmp_path, KERNEL % "no_such_call();", "-arch=sm_90")
    assert "no_such_call" in text
    assert explain(text) is None


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
    text = _output([str(ptxas), f"-arch={option}", str(file), "-o", str(tmp_path / "cubin")])
    assert explain(text) == expected, text


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("nvcc -arch=sm_90 kernel.cu", known.NO_NVCC),
        ("g++ -c kernel.cpp", known.NO_GCC),
    ],
)
def test_a_shell_without_the_program(command, expected, tmp_path):
    for shell in ("sh", "bash"):
        path = shutil.which(shell)
        if path:
            text = _output([path, "-c", command], PATH=str(tmp_path))
            assert explain(text) == expected, text


def test_a_killed_compiler() -> None:
    text = _output(["bash", "-c", "bash -c 'kill -9 $$'; exit 1"])
    assert explain(text) == known.MEMORY, text


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


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH of a process that imports the project and the small fla."""
    return f"{install_small_fla(tmp_path_factory.mktemp('fla'))}:{PROJECT}"


SHORT_OF_MEMORY = f"""
import resource
from quasar_kernels.mount import mount
mount()
from fla.ops.quasar.cuda import nvrtc
def build(source):
    return nvrtc._compile(nvrtc.load_library(), "k", source, {{}}, ("--gpu-architecture=sm_90",))
build({KERNEL % ""!r})
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), used + (1 << 20)))
build({HEAVY!r})
"""


@needs_nvrtc
def test_nvrtc_without_memory(tmp_path: Path, small_path: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHORT_OF_MEMORY)
    text = _output([sys.executable, str(program)], PYTHONPATH=small_path)
    assert explain(text) == known.MEMORY, text[-500:]


@needs_nvrtc
def test_nvrtc_without_its_builtins_library(tmp_path: Path, small_path: str) -> None:
    library = tmp_path / "libnvrtc.so.13"
    library.symlink_to(nvrtc.load_library()._name)
    code = (
        "from quasar_kernels.mount import mount; mount(); from fla.ops.quasar.cuda import nvrtc; "
        f"nvrtc.compile_cached('k', {KERNEL % ''!r}, {{}}, (9, 0))"
    )
    place: dict[str, Any] = {
        switches.NVRTC: str(library),
        switches.CACHE_DIR: str(tmp_path / "cache"),
    }
    text = _output([sys.executable, "-c", code], PYTHONPATH=small_path, **place)
    assert explain(text) == known.NO_NVRTC, text


def test_no_nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(switches.NVRTC, str(tmp_path / "libnvrtc.so"))
    with pytest.raises(nvrtc.CudaUnavailableError) as caught:
        nvrtc.load_library.__wrapped__()
    assert explain(str(caught.value)) == known.NO_NVRTC


@pytest.mark.parametrize(
    ("text", "expected"),
    [
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
