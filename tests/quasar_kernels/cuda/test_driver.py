"""Calls of the CUDA driver in threads without a context, with a fake driver."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda import driver

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
