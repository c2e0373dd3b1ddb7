"""Delivery of the CUDA kernels on a machine without a GPU: cache, faults, the choice of a backend.

The compiler is a stand-in with NVRTC's C interface, but for one test that takes the real one where
it is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar import backend, cache, switches
from fla.ops.quasar.cuda import nvrtc
from fla.ops.quasar.cuda import program as program_module
from fla.ops.quasar.cuda.program import LoadedProgram, Variant, packer
from fla.ops.quasar.cuda.scan import backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import forward as cuda_scan
from fla.ops.quasar.layer.hopper import program as hopper_products

from quasar_kernels.contract import OVERLAY

FOLDER = OVERLAY / "fla/ops/quasar"
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
    monkeypatch.setenv(switches.CACHE_DIR, str(tmp_path / "cache"))
    return stand_in


def compile_it(program="kernel", capability=HOPPER, options=(), headers=None):
    return nvrtc.compile_cached("program", program, headers or {}, capability, options)


def entries():
    return sorted(cache.cache_folder().iterdir())


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
    monkeypatch.setenv(switches.CACHE_DIR, str(tmp_path / "file" / "cache"))
    assert compile_it() == compile_it() == b"KERNEL\0"


def test_writers_at_once_leave_one_whole_entry(compiler):
    code = bytes(range(256)) * 4000
    path = cache.cache_folder() / "entry"
    with ThreadPoolExecutor(8) as pool:
        content = hashlib.sha256(code).digest() + code
        futures = [pool.submit(cache.write_whole, path, content) for _ in range(32)]
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
    assert not cache.cache_folder().exists()


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
    for program in (cuda_scan.PROGRAM, cuda_scan_bwd.PROGRAM):
        monkeypatch.setattr(program, "_found", {})
    monkeypatch.setattr(cuda_scan, "reason_against", lambda *qkv: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv(switches.BACKEND, raising=False)
    x = SimpleNamespace(
        is_cuda=True,
        device=SimpleNamespace(index=0),
        dtype=torch.bfloat16,
        shape=torch.Size((1, 2, 1, 64)),
    )
    return x, x, x


@pytest.fixture
def no_nvrtc(monkeypatch, tmp_path):
    monkeypatch.setenv(switches.NVRTC, str(tmp_path / "libnvrtc.so"))
    ampere = SimpleNamespace(major=8, minor=0, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: ampere)
    monkeypatch.setattr(nvrtc, "load_library", nvrtc.load_library.__wrapped__)


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
    assert switches.NVRTC in line
    assert "\n" not in line
    assert f"{choice.reason}; to mend it, {choice.remedy}" in line


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
    assert f"{choice.reason}; to mend it, {choice.remedy}" in record.getMessage()


@pytest.mark.usefixtures("no_nvrtc")
def test_cuda_on_request_raises_instead(gpu_call, monkeypatch):
    monkeypatch.setenv(switches.BACKEND, "cuda")
    with pytest.raises(nvrtc.CudaUnavailableError, match="NVRTC"):
        backend.choose_backend(*gpu_call)


def loaded(variant):
    return LoadedProgram(variant, {}, 132, False)


def test_a_launch_that_fails_hands_over_to_triton(gpu_call, monkeypatch, caplog):
    def fail(*args, program):
        raise nvrtc.CudaUnavailableError("cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    monkeypatch.setattr(cuda_scan.PROGRAM, "_load", loaded)
    monkeypatch.setattr(cuda_scan, "forward", fail)
    assert backend.choose_backend(*gpu_call).backend == "cuda"
    assert backend.cuda_forward(*gpu_call, None, None, False, 1.0, None) is None
    assert len(caplog.records) == 1
    assert backend.choose_backend(*gpu_call).backend == "triton"


def test_gradients_that_cannot_be_launched_are_left_to_triton(gpu_call, monkeypatch, caplog):
    def fail(*args, program):
        raise nvrtc.CudaUnavailableError("cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    calls = []
    monkeypatch.setattr(
        cuda_scan_bwd.PROGRAM, "_load", lambda variant: calls.append(variant) or loaded(variant)
    )
    monkeypatch.setattr(cuda_scan_bwd, "backward", fail)
    saved = (*gpu_call, None, None, None, None, None, None, 1.0, None)
    assert backend.cuda_backward(*saved) is None
    assert backend.cuda_backward(*saved) is None
    assert len(calls) == len(caplog.records) == 1
    assert "of the gradients" in caplog.records[0].getMessage()


def test_gradients_that_fail_on_request_raise(gpu_call, monkeypatch):
    def fail(*args, program):
        raise nvrtc.CudaUnavailableError("cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    monkeypatch.setenv(switches.BACKEND, "cuda")
    monkeypatch.setattr(cuda_scan_bwd.PROGRAM, "_load", loaded)
    monkeypatch.setattr(cuda_scan_bwd, "backward", fail)
    with pytest.raises(nvrtc.CudaUnavailableError, match="OUT_OF_RESOURCES"):
        backend.cuda_backward(*gpu_call, None, None, None, None, None, None, 1.0, None)


def test_gradients_of_wide_heads_need_hopper(gpu_call, monkeypatch):
    gpu_call[0].shape = torch.Size((1, 2, 1, 128))
    monkeypatch.setattr(cuda_scan_bwd.PROGRAM, "_load", lambda variant: pytest.fail("loaded"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert backend.cuda_backward(*gpu_call, None, None, None, None, None, None, 1.0, None) is None


def test_under_capture_nothing_is_loaded(gpu_call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cuda_scan.PROGRAM, "_load", lambda variant: pytest.fail("loaded"))
    choice = backend.choose_backend(*gpu_call)
    assert choice.backend == "triton"
    assert "CUDA graph" in choice.reason


@pytest.mark.parametrize("name", ["auto", "triton", "torch"])
def test_cpu_tensors_take_torch(monkeypatch, name):
    monkeypatch.setenv(switches.BACKEND, name)
    x = torch.zeros(1, 2, 1, 64)
    assert backend.choose_backend(x, x, x).backend == "torch"


def test_triton_on_request(gpu_call, monkeypatch):
    monkeypatch.setenv(switches.BACKEND, "triton")
    assert backend.choose_backend(*gpu_call) == ("triton", "QUASAR_BACKEND=triton", "", None)


def test_an_unknown_backend_is_refused_by_name(gpu_call, monkeypatch):
    monkeypatch.setenv(switches.BACKEND, "metal")
    with pytest.raises(ValueError, match="QUASAR_BACKEND is 'metal'; set it to one of auto, cuda"):
        backend.choose_backend(*gpu_call)


@pytest.mark.parametrize(
    ("file", "name", "structure"),
    [
        ("cuda/scan/csrc/segments.cuh", "Arguments", cuda_scan.Arguments),
        ("cuda/scan/csrc/backward/gradients.cuh", "GradientArguments", cuda_scan_bwd.Arguments),
        ("layer/hopper/csrc/pack_weights.cu", "PackedMatrix", hopper_products.PackedMatrix),
        (
            "layer/hopper/csrc/projection.cu",
            "ProjectionArguments",
            hopper_products.ProjectionArguments,
        ),
        ("layer/hopper/csrc/gated_rows.cuh", "OutputArguments", hopper_products.OutputArguments),
    ],
)
def test_python_fills_the_arguments_as_cuda_declares_them(file, name, structure):
    text = (FOLDER / file).read_text()
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.S).group(1)
    body = re.sub(r"//.*", "", body)
    declared = []
    for line in filter(None, map(str.strip, body.split(";"))):
        kind, _, names = re.sub(r"\s*\*", " *", line.replace("const ", "")).partition(" ")
        single = {"i64": ctypes.c_int64, "int": ctypes.c_int, "Source": ctypes.c_int}
        single["float"] = ctypes.c_float
        for one in map(str.strip, names.split(",")):
            of = ctypes.c_void_p if "*" in one else single[kind]
            declared.append((one.strip("* ").removesuffix("[3]"), of * 3 if "[3]" in one else of))
    assert structure._fields_ == declared


def test_packed_values_are_those_of_the_structure():
    class Odd(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_int64 * 2), ("c", ctypes.c_float)]

    packed = packer(Odd)(1, 2, 3, 0.5)
    assert packed == bytes(Odd(1, (2, 3), 0.5))
    assert len(packed) == ctypes.sizeof(Odd)


@pytest.fixture
def load_of_sizes(monkeypatch):
    """Load the forward pass on a GPU of a capability, with kernels that take so many bytes."""

    def load(capability, size_of):
        major, minor = capability
        gpu = SimpleNamespace(major=major, minor=minor, multi_processor_count=108)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        monkeypatch.setattr(program_module, "compile_files", lambda *args: b"code")
        monkeypatch.setattr(
            program_module,
            "load_kernels",
            lambda code, names, device: {
                name: SimpleNamespace(arguments=size_of(name)) for name in names
            },
        )
        return cuda_scan.PROGRAM._load(Variant(0, torch.bfloat16))

    return load


@pytest.mark.parametrize("capability", [(8, 0), HOPPER, (12, 0)])
def test_a_loaded_program_has_its_kernels_by_name(load_of_sizes, capability):
    program = load_of_sizes(capability, lambda name: ctypes.sizeof(cuda_scan.Arguments))
    assert list(program.kernels) == ["segment_map", "segment_scan", "segment_output"]
    assert program.on_hopper == (capability == HOPPER)
    assert program.multiprocessors == 108


def test_code_that_takes_other_arguments_is_not_used(load_of_sizes):
    size = ctypes.sizeof(cuda_scan.Arguments)
    with pytest.raises(nvrtc.CudaUnavailableError) as caught:
        load_of_sizes((8, 0), lambda name: size + 8 * ("scan" in name))
    assert caught.value.problem == (
        f"quasar_segment_scan takes {size + 8} bytes of arguments and would be given {size}"
    )


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
    monkeypatch.setenv(switches.CACHE_DIR, str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    code = cuda_scan.PROGRAM.compile(capability, dtype.lower())
    assert code.startswith(b"\x7fELF")
    assert f"quasar_segment_output_{dtype.lower()}".encode() in code
    assert len(entries()) == 1


@pytest.mark.skipif(not _real_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize(
    ("capability", "dtype", "width"),
    [((8, 0), "bf16", 64), ((8, 9), "fp16", 64), ((9, 0), "fp16", 64), ((9, 0), "bf16", 128)],
)
def test_nvrtc_compiles_the_gradients(capability, dtype, width, tmp_path, monkeypatch):
    monkeypatch.setenv(switches.CACHE_DIR, str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    code = cuda_scan_bwd.PROGRAM.compile(capability, dtype, cuda_scan.options_for(width))
    assert code.startswith(b"\x7fELF")
    for name in ("state_checkpoint", "state_gradient_map", "state_gradient", "input_gradient"):
        assert f"quasar_{name}_{dtype}".encode() in code


@pytest.mark.skipif(not _real_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_nvrtc_compiles_the_layers_kernels_for_hopper(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv(switches.CACHE_DIR, str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    code = hopper_products.PROGRAM.compile(HOPPER, dtype)
    assert code.startswith(b"\x7fELF")
    for name in ("pack_weights", "projection", "gated_output"):
        assert f"quasar_{name}_{dtype}".encode() in code
