"""The choice of the implementation of WKV6 and SSD, its reason, and fallbacks."""

import logging

import pytest
import torch

from quasar_kernels.blocks import backends
from quasar_kernels.blocks.ssd import OPERATOR as SSD
from quasar_kernels.blocks.wkv6 import OPERATOR as WKV6
from quasar_kernels.blocks.wkv6 import SHORT

GPU = torch.device("cuda")
NO_MAMBA = "mamba_ssm: ModuleNotFoundError: No module named 'mamba_ssm'"
WIDE = "triton supports heads of up to 128 channels"
LONG = "cuda is for calls of 2 to 16 tokens"


@pytest.mark.parametrize(
    ("operator", "variables", "call", "name", "reason"),
    [
        (SSD, {}, {"width": 128}, "triton", ""),
        (SSD, {}, {"packed": True}, "triton", ""),
        (SSD, {}, {"width": 256}, "torch", WIDE),
        (SSD, {"QUASAR_SSD": "mamba_ssm"}, {}, "torch", NO_MAMBA),
        (SSD, {"QUASAR_SSD": "mamba_ssm"}, {"packed": True}, "torch", "packed sequences"),
        (WKV6, {}, {"width": 64, "tokens": SHORT[-1]}, "cuda", ""),
        (WKV6, {}, {"width": 64, "tokens": SHORT[-1] + 1}, "triton", LONG),
        (WKV6, {}, {"width": 64}, "triton", LONG),
        (WKV6, {}, {"width": 64, "tokens": 2, "values": 48}, "triton", ""),
        (WKV6, {}, {"width": 256}, "torch", f"32, 64 or 128 channels; {WIDE}"),
        (WKV6, {"QUASAR_WKV6": "fla-core"}, {"width": 256}, "fla-core", ""),
        (WKV6, {"QUASAR": "triton"}, {"width": 64, "tokens": 2}, "triton", "QUASAR_BACKEND=triton"),
        (WKV6, {"QUASAR": "torch"}, {}, "torch", "QUASAR_BACKEND=torch"),
        (WKV6, {"QUASAR_WKV6": "cuda"}, {"width": 64, "tokens": 9999}, "cuda", ""),
        (WKV6, {"QUASAR_WKV6": "triton"}, {"width": 256}, "torch", WIDE),
        (WKV6, {"QUASAR_WKV6": "torch"}, {}, "torch", "QUASAR_WKV6_BACKEND=torch"),
    ],
)
def test_the_backend_and_its_reason(monkeypatch, operator, variables, call, name, reason):
    for variable, value in variables.items():
        monkeypatch.setenv(f"{variable}_BACKEND", value)
    found = operator.backend(GPU, torch.bfloat16, **call)
    assert found.name == name
    assert reason in found.reason


def test_torch_computes_calls_without_kernels(monkeypatch):
    found = WKV6.backend(torch.device("cpu"), torch.bfloat16)
    assert found == ("torch", "the tensors are not on a GPU", "")
    assert WKV6.backend(GPU, torch.float64).reason == "the kernels have no fp64"
    monkeypatch.setenv("QUASAR_WKV6_BACKEND", "fla")
    words = "'fla'; set it to one of auto, cuda, triton, fla-core, torch"
    with pytest.raises(ValueError, match=words):
        WKV6.backend(GPU, torch.bfloat16)


@pytest.mark.parametrize("operator", [SSD, WKV6], ids=["ssd", "wkv6"])
def test_libraries_that_tune_their_kernels_need_a_request(operator):
    """Their first call takes minutes."""
    found = operator.backend(GPU, torch.bfloat16, width=256)
    assert found.name == "torch"
    assert f"set {operator.variable}=fla-core; its first call tunes it" in found.remedy


class OnGPU(torch.Tensor):
    """A CPU tensor whose attribute `device` is a GPU."""

    device = GPU


def test_torch_replaces_failed_kernels_with_one_log_line(caplog):
    def broken(*_):
        raise RuntimeError("no kernel image\nat line 1")

    kernels = [
        backends.Kernels("absent", "no_such_library", "pip install it", broken),
        backends.Kernels("broken", "math", "", broken),
    ]
    operator = backends.Operator("X", kernels, lambda x: (x, x))
    like = torch.zeros(1).as_subclass(OnGPU)
    assert operator.backend(GPU, like.dtype).name == "broken"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert operator(like, False, 1) == (1, 1)
    (line,) = caplog.messages
    assert line.startswith("X runs in torch: absent: ModuleNotFoundError: No module named 'no_su")
    assert "broken failed: RuntimeError no kernel image; pip install it; or fix" in line
    assert "\n" not in line


def raising(error):
    """Return kernels that fail."""

    def compute(_):
        raise error

    return compute


def one_kernel(compute, in_torch=lambda x: (x, x)):
    return backends.Operator("X", [backends.Kernels("a", "math", "", compute)], in_torch)


def test_invalid_and_empty_calls_and_a_lack_of_memory_disable_no_kernels():
    like, wrong = torch.zeros(1).as_subclass(OnGPU), raising(ValueError("the call is wrong"))
    invalid, full = one_kernel(wrong, wrong), one_kernel(raising(torch.OutOfMemoryError("full")))
    with pytest.raises(ValueError, match="the call is wrong"):
        invalid(like, False, -1)
    with pytest.raises(torch.OutOfMemoryError):  # torch needs no less
        full(like, False, 1)
    empty = one_kernel(raising(AssertionError()))
    assert empty(like[:0], False, 1) == (1, 1)
    assert {x.backend(GPU, torch.float32).name for x in (invalid, full, empty)} == {"a"}
