"""The choice of a call's implementation, on a machine without a GPU: switches, faults, capture."""

import logging
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar import backend, switches
from fla.ops.quasar.cuda import nvrtc
from fla.ops.quasar.cuda.program import LoadedProgram
from fla.ops.quasar.cuda.scan import scan_backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.operator_types import Saved, ScanInputs
from fla.ops.quasar.segments import Segments


@pytest.fixture
def gpu_call(monkeypatch):
    """Return q, k and v of a call on a fake GPU; no program is loaded or has failed."""
    for program in (cuda_scan.PROGRAM, cuda_scan_bwd.PROGRAM):
        monkeypatch.setattr(program, "_entries", {})
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


BETA = torch.ones(1)
BY_TRITON = "gradients by Triton"


@pytest.fixture
def gradients(gpu_call, monkeypatch):
    """Return a function that runs the backward pass after a forward pass by the CUDA kernels."""
    monkeypatch.setattr(backend, "plan_of", lambda v, segments: None)
    monkeypatch.setattr(backend.triton_passes, "backward", lambda *args: BY_TRITON)

    def run(requested, width=64, beta=BETA, g=None):
        x = torch.zeros(1, 2, 1, width, dtype=torch.bfloat16)
        cut = Segments(1, 1, 1, 64, None, None, 64)
        saved = Saved(ScanInputs.of(x, x, x, beta, g=g), None, None, cut)
        return backend.scan_backward(saved, x, backend=requested)

    return run


@pytest.fixture
def no_nvrtc(monkeypatch, tmp_path):
    monkeypatch.setenv(switches.NVRTC, str(tmp_path / "libnvrtc.so"))
    ampere = SimpleNamespace(major=8, minor=0, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: ampere)
    monkeypatch.setattr(nvrtc, "load_library", nvrtc.load_library.__wrapped__)


def check_triton_with_one_warning(gpu_call, caplog, *parts):
    """Three calls use Triton and log one line, which contains the parts."""
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            choice = backend.choose_backend(*gpu_call)
    assert choice.backend == "triton"
    (record,) = caplog.records
    line = record.getMessage()
    assert "\n" not in line
    for part in (*parts, f"{choice.reason}; remedy: {choice.remedy}"):
        assert part in line


@pytest.mark.usefixtures("no_nvrtc")
def test_without_nvrtc_triton_is_used(gpu_call, caplog):
    problem = "NVRTC, CUDA's run-time compiler, was not found"
    remedy = "install nvidia-cuda-nvrtc"
    check_triton_with_one_warning(gpu_call, caplog, problem, remedy, switches.NVRTC)


def test_on_an_old_gpu_triton_is_used(gpu_call, monkeypatch, caplog):
    turing = SimpleNamespace(major=7, minor=5, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: turing)
    problem = "compute capability 7.5; the CUDA kernels need 8.0"
    check_triton_with_one_warning(gpu_call, caplog, problem, "QUASAR_BACKEND=triton")


@pytest.mark.usefixtures("no_nvrtc")
def test_backend_cuda_raises_if_the_kernels_are_unavailable(gpu_call, monkeypatch):
    monkeypatch.setenv(switches.BACKEND, "cuda")
    with pytest.raises(nvrtc.CudaUnavailableError, match="NVRTC"):
        backend.choose_backend(*gpu_call)


def loaded(variant):
    return LoadedProgram(variant, {}, 132, False)


def fail(*args, program, every=None):
    raise nvrtc.CudaUnavailableError("cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")


def test_after_a_failed_launch_triton_is_used(gpu_call, monkeypatch, caplog):
    monkeypatch.setattr(cuda_scan.PROGRAM, "_load", loaded)
    monkeypatch.setattr(cuda_scan, "forward", fail)
    assert backend.choose_backend(*gpu_call).backend == "cuda"
    monkeypatch.setattr(backend, "kernel_inputs", lambda inputs: inputs)
    monkeypatch.setattr(backend.triton_passes, "forward", lambda *_, **__: "by Triton")
    inputs = ScanInputs.of(*gpu_call, BETA)
    assert backend.scan_forward(inputs, backend="auto") == "by Triton"
    with pytest.raises(nvrtc.CudaUnavailableError):
        backend.scan_forward(inputs, backend="cuda")
    assert len(caplog.records) == 1
    assert backend.choose_backend(*gpu_call).backend == "triton"


def test_after_a_failed_launch_triton_computes_the_gradients(gradients, monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(
        cuda_scan_bwd.PROGRAM, "_load", lambda variant: calls.append(variant) or loaded(variant)
    )
    monkeypatch.setattr(cuda_scan_bwd, "backward", fail)
    monkeypatch.setenv(switches.BACKEND, "cuda")  # the backward pass uses the forward pass's value
    for _ in range(2):
        assert gradients("auto") == BY_TRITON
    assert len(calls) == len(caplog.records) == 1
    assert "of the gradients" in caplog.records[0].getMessage()


@pytest.mark.parametrize("g", [None, torch.zeros(1)])
def test_gradients_are_compiled_for_step_sizes_and_decays(gradients, monkeypatch, g):
    monkeypatch.setattr(cuda_scan_bwd.PROGRAM, "_load", loaded)
    monkeypatch.setattr(cuda_scan_bwd, "backward", lambda *args, program: program.variant)
    variant = gradients("auto", beta=torch.ones(1, 2, 1), g=g)
    assert variant.options[-1] == ("-DQUASAR_READ_STEP" if g is None else "-DQUASAR_DECAY")


def test_with_backend_cuda_failed_gradients_raise(gradients, monkeypatch):
    monkeypatch.setattr(cuda_scan_bwd.PROGRAM, "_load", loaded)
    monkeypatch.setattr(cuda_scan_bwd, "backward", fail)
    with pytest.raises(nvrtc.CudaUnavailableError, match="OUT_OF_RESOURCES"):
        gradients("cuda")


def test_gradients_of_wide_heads_use_cuda_only_on_hopper(gradients, monkeypatch):
    monkeypatch.setattr(cuda_scan_bwd.PROGRAM, "_load", lambda variant: pytest.fail("loaded"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert gradients("auto", width=128) == BY_TRITON


def test_during_a_capture_nothing_is_loaded(gpu_call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cuda_scan.PROGRAM, "_load", lambda variant: pytest.fail("loaded"))
    choice = backend.choose_backend(*gpu_call)
    assert choice.backend == "triton"
    assert "CUDA graph" in choice.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": torch.Size((1, 2, 1, 192))}, "heads of 192 channels in torch.bfloat16"),
        ({"dtype": torch.float64}, "heads of 64 channels in torch.float64"),
        ({"is_cuda": False}, "not on a GPU"),
    ],
)
@pytest.mark.parametrize("name", ["auto", "cuda", "triton"])
def test_torch_computes_the_calls_without_kernels(gpu_call, monkeypatch, name, change, reason):
    monkeypatch.setenv(switches.BACKEND, name)
    vars(gpu_call[0]).update(change)
    choice = backend.choose_backend(*gpu_call)
    assert choice.backend == "torch"
    assert reason in choice.reason


def test_an_unknown_backend_is_refused(gpu_call, monkeypatch):
    monkeypatch.setenv(switches.BACKEND, "metal")
    with pytest.raises(ValueError, match="QUASAR_BACKEND is 'metal'; set it to one of auto, cuda"):
        backend.choose_backend(*gpu_call)
