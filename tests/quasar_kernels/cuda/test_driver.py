"""Calls of the CUDA driver: parts of programs, and threads without a context (recorded calls)."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda import driver, nvrtc

from tests.quasar_kernels.cuda.installed import needs_nvrtc

NO_CONTEXT = 201


@pytest.fixture
def current(monkeypatch):
    """A driver whose functions need a context; the list has the contexts made current."""
    made = []

    def needs_context(*_):
        return 0 if made else NO_CONTEXT

    functions = {
        "cuDeviceGet": lambda *_: 0,
        "cuDevicePrimaryCtxRetain": lambda *_: 0,
        "cuCtxSetCurrent": lambda context: made.append(context) or 0,
        "cuLaunchKernel": needs_context,
    }
    monkeypatch.setattr(driver, "_driver", lambda: SimpleNamespace(**functions))
    monkeypatch.setattr(driver, "_encoder", lambda: needs_context)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch_private, "raw_stream", lambda device: 0)
    return made


def test_kernels_and_tensor_maps_need_no_context_of_the_thread(current):
    driver.Kernel(1, 128, 0, 1, 0, 8).launch((1, 1), (ctypes.c_char_p * 1)(b""))
    assert len(current) == 1
    current.clear()
    assert driver.tensor_map(16, (64, 8, 1, 1), (64, 512, 512), (64, 1, 1, 1))
    assert len(current) == 1


@needs_nvrtc
@pytest.mark.parametrize("capability", [(9, 0), (99, 0)], ids=["machine code", "PTX"])
def test_a_kernel_is_looked_for_in_its_part_only(capability):
    names = ["quasar_a_map_bf16", "quasar_a_bf16", "quasar_map"]
    parts = [
        nvrtc.compile_cached(
            "part",
            f'extern "C" {{ __global__ void {x}() {{}} __device__ int {x}_launch; }}',
            {},
            capability,
        )
        for x in names
    ]
    assert [driver.part_with(name, parts) for name in reversed(names)] == [2, 1, 0]
