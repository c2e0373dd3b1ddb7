"""CUDA programs on a machine without a GPU: argument structures and loading."""

import ctypes
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar.cuda import nvrtc
from fla.ops.quasar.cuda import program as program_module
from fla.ops.quasar.cuda.program import CudaProgram, LoadedProgram, Variant, serializer
from fla.ops.quasar.cuda.scan import scan_backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.layer import hopper, portable, weight_tiles, wide

from quasar_kernels.blocks.wkv6_cuda import launch as wkv6
from quasar_kernels.contract import OVERLAY
from quasar_kernels.delta_rule.kda_cuda import launch as kda
from tests.processes import HANG

FOLDER = OVERLAY / "fla/ops/quasar"
HOPPER = (9, 0)


@pytest.mark.parametrize(
    ("file", "name", "structure"),
    [
        ("cuda/scan/csrc/segments.cuh", "Arguments", cuda_scan.Arguments),
        ("cuda/scan/csrc/backward/gradients.cuh", "GradientArguments", cuda_scan_bwd.Arguments),
        ("layer/csrc/pack_weights.cu", "PackedMatrix", weight_tiles.PackedMatrix),
        ("layer/csrc/pack_weights.cu", "ConvertedVector", weight_tiles.ConvertedVector),
        ("layer/csrc/hopper/projection.cu", "ProjectionArguments", hopper.ProjectionArguments),
        ("layer/csrc/hopper/gated_rows.cuh", "OutputArguments", hopper.OutputArguments),
        ("layer/csrc/hopper/wide_projection.cu", "WideArguments", wide.WideArguments),
        (
            "layer/csrc/portable/resident_projection.cu",
            "ProjectionArguments",
            portable.ProjectionArguments,
        ),
        ("layer/csrc/portable/resident_output.cu", "OutputArguments", portable.OutputArguments),
        (wkv6.CSRC / "walk.cuh", "Arguments", wkv6.Arguments),
        (kda.CSRC / "kda_chunk.cu", "Arguments", kda.Arguments),
    ],
)
def test_argument_structures_are_the_same_in_python_and_cuda(file, name, structure):
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


def test_serialized_values_have_the_bytes_of_the_structure():
    class Odd(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_int64 * 2), ("c", ctypes.c_float)]

    serialized = serializer(Odd)(1, 2, 3, 0.5)
    assert serialized == bytes(Odd(1, (2, 3), 0.5))
    assert len(serialized) == ctypes.sizeof(Odd)


@pytest.fixture
def load_of_sizes(monkeypatch):
    """Load the forward pass for a GPU; size_of(name) is the size of a kernel's arguments."""

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


@pytest.mark.parametrize("capability", [HOPPER, (12, 0)])
def test_a_loaded_program_has_its_kernels_by_name(load_of_sizes, capability):
    program = load_of_sizes(capability, lambda name: ctypes.sizeof(cuda_scan.Arguments))
    assert list(program.kernels) == ["segment_map", "segment_scan", "segment_output"]
    assert program.on_hopper == (capability == HOPPER)
    assert program.multiprocessors == 108


def test_code_of_another_version_of_the_arguments_is_refused(load_of_sizes):
    size = ctypes.sizeof(cuda_scan.Arguments)
    with pytest.raises(nvrtc.CudaUnavailableError) as caught:
        load_of_sizes((8, 0), lambda name: size + 8 * ("scan" in name))
    assert caught.value.problem == (
        f"quasar_segment_scan takes {size + 8} bytes of arguments, but the host passes {size}"
    )


def test_a_prepared_program_is_loaded_once_in_the_background(monkeypatch):
    started, allowed, loads = threading.Event(), threading.Event(), []

    def load(variant):
        started.set()
        assert allowed.wait(HANG)
        loads.append(variant)
        return LoadedProgram(variant, {}, 108, False)

    program = CudaProgram("name", [], {}, "%s")
    monkeypatch.setattr(program, "_load", load)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    variant = Variant(0, torch.bfloat16)
    program.prepare(variant)
    program.prepare(variant)
    assert started.wait(HANG)
    assert not loads  # `prepare` has not waited
    allowed.set()
    assert program.load(variant).variant == variant
    program.prepare(variant)
    assert loads == [variant]
