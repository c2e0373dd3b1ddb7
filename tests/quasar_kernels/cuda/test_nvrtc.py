"""Delivery of the CUDA kernels on a machine without a GPU: cache, faults, the choice of a backend.

The compiler is a stand-in with NVRTC's C interface, but for one test that takes the real one where
it is installed.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar import backend
from fla.ops.quasar.cuda import nvrtc
from fla.ops.quasar.cuda.scan import backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import forward as cuda_scan
from fla.ops.quasar.layer.hopper import program as hopper_products

from quasar_kernels.contract import OVERLAY

CSRC = OVERLAY / "fla/ops/quasar/cuda/scan/csrc"
HOPPER = (9, 0)


class StandIn:
    """Answers NVRTC's calls; the code of a program is its own text, upper case."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.compilations = 0

    def nvrtcGetErrorString(self, status: int) -> bytes:
        return b"NVRTC_ERROR_COMPILATION"

    def nvrtcVersion(self, major, minor) -> int:
        major._obj.value, minor._obj.value = 13, 0
        return 0

    def nvrtcGetNumSupportedArchs(self, count) -> int:
        count._obj.value = 3
        return 0

    def nvrtcGetSupportedArchs(self, archs) -> int:
        archs[:] = [80, 89, 90]
        return 0

    def nvrtcCreateProgram(self, handle, source, name, count, texts, names) -> int:
        self.code = source.upper() + b"\0"
        return 0

    def nvrtcCompileProgram(self, handle, count, options) -> int:
        self.compilations += 1
        return 6 if self.error else 0

    def nvrtcGetCUBINSize(self, handle, size) -> int:
        size._obj.value = len(self.code)
        return 0

    def nvrtcGetCUBIN(self, handle, buffer) -> int:
        buffer.raw = self.code
        return 0

    def nvrtcGetProgramLogSize(self, handle, size) -> int:
        size._obj.value = len(self.error)
        return 0

    def nvrtcGetProgramLog(self, handle, buffer) -> int:
        buffer.raw = self.error.encode()
        return 0

    def nvrtcDestroyProgram(self, handle) -> int:
        return 0


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    stand_in = StandIn()
    monkeypatch.setattr(nvrtc, "load_library", lambda: stand_in)
    monkeypatch.setenv(nvrtc.CACHE, str(tmp_path / "cache"))
    return stand_in


def compile_it(program="kernel", capability=HOPPER, options=(), headers=None):
    return nvrtc.compile_cached("program", program, headers or {}, capability, options)


def entries():
    return sorted(nvrtc.cache_folder().iterdir())


def test_a_program_is_compiled_once(compiler):
    assert compile_it() == compile_it() == b"KERNEL\0"
    assert compiler.compilations == 1


@pytest.mark.parametrize(
    "change",
    [
        {"program": "other"},
        {"capability": (8, 0)},
        {"options": ("-DX",)},
        {"headers": {"a.cuh": "text"}},
    ],
    ids=str,
)
def test_whatever_changes_the_code_makes_a_new_entry(compiler, change):
    compile_it()
    compile_it(**change)
    assert compiler.compilations == 2
    assert len(entries()) == 2


def test_another_version_of_the_compiler_makes_a_new_entry(compiler, monkeypatch):
    compile_it()
    monkeypatch.setattr(nvrtc, "_version", lambda library: (13, 1))
    compile_it()
    assert compiler.compilations == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[:-1],
        lambda content: content[:-1] + b"x",
        lambda content: content[:32],
    ],
    ids=["empty", "short", "cut", "changed", "no code"],
)
def test_a_damaged_entry_is_compiled_again(compiler, damage):
    compile_it()
    (path,) = entries()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert compile_it() == b"KERNEL\0"
    assert compiler.compilations == 2
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_does_not_matter(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(nvrtc.CACHE, str(tmp_path / "file" / "cache"))
    assert compile_it() == compile_it() == b"KERNEL\0"


def test_writers_at_once_leave_one_whole_entry(compiler):
    code = bytes(range(256)) * 4000
    path = nvrtc.cache_folder() / "entry"
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(nvrtc._write, path, code) for _ in range(32)]
        seen = [nvrtc._read(path) for _ in range(200)]
        for future in futures:
            future.result()
    assert nvrtc._read(path) == code
    assert {x for x in seen if x is not None} <= {code}
    assert entries() == [path]


def test_an_error_of_the_compiler_becomes_one_line(compiler):
    compiler.error = "program.cu(3): warning: x\nprogram.cu(7): error: no such thing\nmore\n"
    with pytest.raises(nvrtc.CudaUnavailableError) as caught:
        compile_it()
    assert "program.cu(7): error: no such thing; to mend it, " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not nvrtc.cache_folder().exists()


@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "compute_90"), ((8, 6), "compute_80")],
)
def test_a_gpu_newer_than_the_toolkit_gets_ptx(capability, target):
    assert nvrtc.target_for(capability, [80, 89, 90]) == target


def test_a_gpu_older_than_the_toolkit_is_refused():
    with pytest.raises(nvrtc.CudaUnavailableError, match="install a torch build"):
        nvrtc.target_for((7, 0), [75, 80])


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("cuModuleLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "driver"),
        ("cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU", "torch build"),
        ("nvrtc: error: invalid value for --gpu-architecture (-arch)", "torch build"),
        ("nvrtc: error: failed to open libnvrtc-builtins.so.13.0", "nvidia-cuda-nvrtc"),
        ('error: could not open source file "fragments.cuh"', "csrc"),
        ("fatal: Out of memory", "free memory"),
        ("something new", "QUASAR_BACKEND=triton"),
    ],
)
def test_known_failures_have_a_remedy(text, remedy):
    assert remedy in nvrtc.remedy_for(text)


@pytest.fixture
def gpu_call(monkeypatch):
    """q, k and v that look like a call on a GPU, and no memory of earlier failures."""
    for programs in (backend._programs, backend._gradient_programs):
        monkeypatch.setattr(programs, "_loaded", {})
        monkeypatch.setattr(programs, "_failures", {})
    monkeypatch.setattr(cuda_scan, "reason_against", lambda *qkv: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv(backend.SWITCH, raising=False)
    x = SimpleNamespace(
        is_cuda=True,
        device=SimpleNamespace(index=0),
        dtype=torch.bfloat16,
        shape=torch.Size((1, 2, 1, 64)),
    )
    return x, x, x


@pytest.fixture
def no_nvrtc(monkeypatch, tmp_path):
    monkeypatch.setenv(nvrtc.LIBRARY, str(tmp_path / "libnvrtc.so"))
    monkeypatch.setattr(cuda_scan, "load_program", lambda *key: nvrtc.load_library.__wrapped__())


@pytest.mark.usefixtures("no_nvrtc")
def test_without_nvrtc_triton_serves_and_the_log_says_why_once(gpu_call, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            choice = backend.choose_backend(*gpu_call)
    assert choice.backend == "triton"
    (record,) = caplog.records
    line = record.getMessage()
    assert "NVRTC, CUDA's run-time compiler, was not found" in line
    assert "install nvidia-cuda-nvrtc" in line
    assert nvrtc.LIBRARY in line
    assert "\n" not in line
    assert choice.reason in line


def test_a_gpu_that_is_too_old_is_served_by_triton_and_the_log_says_so_once(
    gpu_call, monkeypatch, caplog
):
    turing = SimpleNamespace(major=7, minor=5, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: turing)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            choice = backend.choose_backend(*gpu_call)
    assert choice.backend == "triton"
    (record,) = caplog.records
    assert "compute capability 7.5; the CUDA kernels need 8.0" in record.getMessage()
    assert "QUASAR_BACKEND=triton" in record.getMessage()
    assert choice.reason in record.getMessage()


@pytest.mark.usefixtures("no_nvrtc")
def test_cuda_on_request_raises_instead(gpu_call, monkeypatch):
    monkeypatch.setenv(backend.SWITCH, "cuda")
    with pytest.raises(nvrtc.CudaUnavailableError, match="NVRTC"):
        backend.choose_backend(*gpu_call)


def test_a_launch_that_fails_hands_over_to_triton(gpu_call, monkeypatch, caplog):
    def fail(*args):
        raise nvrtc.CudaUnavailableError("cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    monkeypatch.setattr(cuda_scan, "load_program", lambda *key: None)
    monkeypatch.setattr(cuda_scan, "forward", fail)
    assert backend.choose_backend(*gpu_call).backend == "cuda"
    assert backend.cuda_forward(*gpu_call, None, None, False, 1.0, None) is None
    assert len(caplog.records) == 1
    assert backend.choose_backend(*gpu_call).backend == "triton"


def test_gradients_that_cannot_be_launched_are_left_to_triton(gpu_call, monkeypatch, caplog):
    def fail(*args):
        raise nvrtc.CudaUnavailableError("cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    calls = []
    monkeypatch.setattr(cuda_scan_bwd, "load_program", lambda *key: calls.append(key) or "it")
    monkeypatch.setattr(cuda_scan_bwd, "backward", fail)
    saved = (*gpu_call, None, None, None, None, None, None, 1.0, None)
    assert backend.cuda_backward(*saved) is None
    assert backend.cuda_backward(*saved) is None
    assert len(calls) == len(caplog.records) == 1
    assert "of the gradients" in caplog.records[0].getMessage()


def test_gradients_that_fail_on_request_raise(gpu_call, monkeypatch):
    def fail(*args):
        raise nvrtc.CudaUnavailableError("cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    monkeypatch.setenv(backend.SWITCH, "cuda")
    monkeypatch.setattr(cuda_scan_bwd, "load_program", lambda *key: "it")
    monkeypatch.setattr(cuda_scan_bwd, "backward", fail)
    with pytest.raises(nvrtc.CudaUnavailableError, match="OUT_OF_RESOURCES"):
        backend.cuda_backward(*gpu_call, None, None, None, None, None, None, 1.0, None)


def test_gradients_of_wide_heads_need_hopper(gpu_call, monkeypatch):
    gpu_call[0].shape = torch.Size((1, 2, 1, 128))
    monkeypatch.setattr(cuda_scan_bwd, "load_program", lambda *key: pytest.fail("loaded"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert backend.cuda_backward(*gpu_call, None, None, None, None, None, None, 1.0, None) is None


def test_under_capture_nothing_is_loaded(gpu_call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cuda_scan, "load_program", lambda *key: pytest.fail("loaded"))
    choice = backend.choose_backend(*gpu_call)
    assert choice.backend == "triton"
    assert "CUDA graph" in choice.reason


@pytest.mark.parametrize("name", ["auto", "triton", "torch"])
def test_cpu_tensors_take_torch(monkeypatch, name):
    monkeypatch.setenv(backend.SWITCH, name)
    x = torch.zeros(1, 2, 1, 64)
    assert backend.choose_backend(x, x, x).backend == "torch"


def test_triton_on_request(gpu_call, monkeypatch):
    monkeypatch.setenv(backend.SWITCH, "triton")
    assert backend.choose_backend(*gpu_call) == ("triton", "QUASAR_BACKEND=triton")


def test_an_unknown_backend_is_refused_by_name(gpu_call, monkeypatch):
    monkeypatch.setenv(backend.SWITCH, "metal")
    with pytest.raises(ValueError, match="QUASAR_BACKEND is 'metal'; set it to one of auto, cuda"):
        backend.choose_backend(*gpu_call)


@pytest.mark.parametrize(
    ("file", "name", "packed"),
    [
        ("segments.cuh", "Arguments", cuda_scan.ARGUMENTS),
        ("backward/gradients.cuh", "GradientArguments", cuda_scan_bwd.ARGUMENTS),
    ],
)
def test_python_packs_the_arguments_as_cuda_declares_them(file, name, packed):
    text = (CSRC / file).read_text()
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.S).group(1)
    body = re.sub(r"//.*", "", body)
    declared = ""
    for line in filter(None, map(str.strip, body.split(";"))):
        kind, _, names = line.replace("const ", "").partition(" ")
        for name in names.split(","):
            code = {"i64": "q", "int": "i", "float": "f"}.get(kind, "P")
            declared += ("P" if "*" in name else code) * (3 if "[3]" in name else 1)
    written = re.sub(r"(\d+)(\w)", lambda m: int(m[1]) * m[2], packed.format)
    assert written == declared


def test_importing_the_operator_and_the_layer_loads_no_library_of_cuda():
    code = (
        "from quasar_kernels.mount import mount; mount(); import fla.layers.quasar; "
        "from fla.ops.quasar.cuda import driver, nvrtc; "
        "loaders = driver._driver, nvrtc.load_library; "
        "print([f.cache_info().currsize for f in loaders])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[-2] == "[0, 0]"


def _real_nvrtc() -> bool:
    try:
        nvrtc.load_library()
    except nvrtc.CudaUnavailableError:
        return False
    return True


@pytest.mark.skipif(not _real_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
@pytest.mark.parametrize("dtype", ["BF16", "FP16"])
def test_nvrtc_compiles_the_sources_without_headers(capability, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv(nvrtc.CACHE, str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    code = cuda_scan.compile_program(capability, dtype.lower(), ())
    assert code.startswith(b"\x7fELF")
    assert f"quasar_segment_output_{dtype.lower()}".encode() in code
    assert len(entries()) == 1


@pytest.mark.skipif(not _real_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize(
    ("capability", "dtype", "width"),
    [((8, 0), "bf16", 64), ((8, 9), "fp16", 64), ((9, 0), "fp16", 64), ((9, 0), "bf16", 128)],
)
def test_nvrtc_compiles_the_gradients(capability, dtype, width, tmp_path, monkeypatch):
    monkeypatch.setenv(nvrtc.CACHE, str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    code = cuda_scan_bwd.compile_program(capability, dtype, (), width)
    assert code.startswith(b"\x7fELF")
    for name in ("state_checkpoint", "state_gradient_map", "state_gradient", "input_gradient"):
        assert f"quasar_{name}_{dtype}".encode() in code


@pytest.mark.skipif(not _real_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_nvrtc_compiles_the_layers_kernels_for_hopper(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv(nvrtc.CACHE, str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    code = hopper_products.compile_program(dtype)
    assert code.startswith(b"\x7fELF")
    for name in ("pack_weights", "projection", "gated_output"):
        assert f"quasar_{name}_{dtype}".encode() in code
