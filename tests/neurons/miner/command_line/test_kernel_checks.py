"""`doctor --kernels` with real compilers and child processes, and with fake GPUs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.measuring.runner import MeasurementError
from neurons.miner.command_line import kernel_checks
from neurons.miner.command_line.kernel_checks import compile_kernels
from neurons.miner.command_line.machine_checks import Finding
from quasar_kernels import compile_failures as known
from quasar_kernels.diagnosis import Build, Builds, PathsTaken, PathTaken, compile_for
from quasar_kernels.mount import mount
from tests.neurons.miner.miner_command import Command
from tests.small_fla import install_small_fla

NO_NVRTC = "NVRTC was not found"


def test_a_machine_without_gpu_and_nvrtc_gets_warnings(command: Command, tmp_path: Path) -> None:
    nowhere, small_fla = str(tmp_path / "libnvrtc.so"), install_small_fla(tmp_path / "fla")
    environ = {"QUASAR_NVRTC": nowhere, "PYTHONPATH": small_fla, "STATE_DIR": str(tmp_path)}
    done = command("doctor", "--kernels", "--device", "cpu", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["gpu", "nvrtc", "cpu", "cpu", "sm"]
    assert all(" -> " in line for line in lines if not line.startswith("ok"))
    assert known.NO_NVRTC.remedy in lines[1]
    assert "torch serves: the tensors are not on a GPU" in lines[2]
    assert "nothing was compiled for 8.0, 8.6, 8.9, 9.0, 10.0, 12.0" in lines[4]


def test_a_gpu_that_torch_cannot_use_is_a_failure(command: Command, tmp_path: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "STATE_DIR": str(tmp_path)}
    done = command("doctor", "--kernels", "--device", "cuda", "--json", **hidden)
    assert done.returncode == 1, done.stdout + done.stderr
    last = json.loads(done.stdout)[-1]
    assert (last["name"], last["level"]) == ("cuda", "failure")
    assert last["remedy"] in (known.CPU_TORCH.remedy, known.DRIVER_MISSING.remedy)


def test_some_programs_are_only_compiled_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    mount()
    from fla.ops.quasar.cuda.program import CudaProgram

    monkeypatch.setattr(CudaProgram, "compile", lambda *_, **__: [b"\x7fELF"])
    everywhere = {"operator", "operator 128", "gradients"}
    for capability, more in (((8, 9), set()), ((9, 0), {"gradients 128", "layer", "wide layer"})):
        builds = compile_for(*capability).builds
        assert {one.program for one in builds} == everywhere | more
        assert {one.dtype for one in builds} == {"bf16", "fp16"}


def test_a_gpu_older_than_the_kernels_is_explained(monkeypatch, tmp_path):
    """A separate process reports it; the tests of NVRTC compile the kernels themselves."""
    monkeypatch.setenv("PYTHONPATH", install_small_fla(tmp_path))
    builds = compile_kernels((7, 5))
    check = kernel_checks.compiles((7, 5), lambda _: builds, needed=True)
    assert (check.name, check.level) == ("sm_75", "failure")
    assert "compute capability 7.5; the CUDA kernels need 8.0" in check.detail
    assert "QUASAR_BACKEND=triton" in check.remedy


def _path(
    capability: tuple[int, int] | None, backend: str, reason: str = "", **changes: Any
) -> Any:
    device = "cuda:0" if capability else "cpu"
    values = {"rms": 1e-3, "reason": reason or "the CUDA kernels take this call", **changes}
    return PathTaken(
        device=device, name="GPU", capability=capability, dtype="bf16", backend=backend, **values
    )


def _examine(
    *paths: PathTaken, broken: tuple[tuple[int, int], ...] = (), nvrtc_error: str = ""
) -> dict[str, Finding]:
    def build(capability: tuple[int, int]) -> Builds:
        error = "nvrtc: error: invalid value for --gpu-architecture (-arch)"
        bad = capability in broken
        one = Build(program="operator", dtype="bf16", seconds=1, error=error if bad else "")
        return Builds(builds=(one,))

    found = PathsTaken(nvrtc="13.0", nvrtc_error=nvrtc_error, paths=paths)
    device = "cuda" if any(path.capability for path in paths) else "cpu"
    checks = kernel_checks.examine(device, find=lambda device: found, build=build)
    return {check.name: check for check in checks}


def _failed(checks: dict[str, Finding]) -> set[str]:
    return {name for name, check in checks.items() if check.level == "failure"} - {"gpu"}


HOPPER = _path((9, 0), "cuda")


@pytest.mark.parametrize(
    ("paths", "broken", "failed"),
    [
        ([HOPPER], [(12, 0)], set()),  # another GPU's capability
        ([HOPPER], [(9, 0)], {"sm_90"}),
        ([_path((10, 3), "cuda")], [(10, 3)], {"sm_103"}),  # a capability without a build
        ([_path(None, "torch")], [(12, 0)], {"sm_120"}),  # without a GPU, every capability
        ([_path((7, 5), "triton", "the GPU is older than 8.0")], [(8, 0)], set()),
        ([HOPPER, _path((9, 0), "cuda", call="operator 128", rms=0.5)], [], {"cuda:0 bf16 128"}),
        ([HOPPER, _path((9, 0), "", call="layer", error="x")], [], {"cuda:0 bf16 layer"}),
        *(
            ([_path((9, 0), "cuda", **wrong)], [], {"cuda:0 bf16"})
            for wrong in ({"rms": 0.5}, {"rms": float("nan")}, {"rms": None}, {"error": "x"})
        ),
    ],
)
def test_faults_of_this_machines_gpu_are_failures(paths, broken, failed):
    checks = _examine(*paths, broken=tuple(broken))
    assert _failed(checks) == failed
    for capability in broken:
        check = checks["sm_{}{}".format(*capability)]
        assert check.remedy == known.OTHER_GPUS.remedy


def test_a_hopper_gpu_without_the_cuda_path_is_a_failure() -> None:
    path = _path((9, 0), "triton", NO_NVRTC, remedy="install nvidia-cuda-nvrtc")
    checks = _examine(path, nvrtc_error=NO_NVRTC)
    assert _failed(checks) == {"cuda:0 bf16", "nvrtc"}
    check = checks["cuda:0 bf16"]
    assert "triton serves, not cuda: NVRTC was not found" in check.detail
    assert check.remedy == "Install nvidia-cuda-nvrtc"


def _raises(error: MeasurementError) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        raise error

    return call


def test_a_child_that_dies_is_explained_by_its_log() -> None:
    died = MeasurementError("the worker died with status -6", "crash", "LLVM ERROR: out of memory")
    check = kernel_checks.compiles((9, 0), _raises(died), needed=True)
    assert "status -6: the compiler ran out of memory" in check.detail
    assert check.remedy == known.MEMORY.remedy
    *_, last = kernel_checks.examine("cpu", find=_raises(died))
    assert (last.name, last.level, last.remedy) == ("cpu", "failure", known.MEMORY.remedy)
