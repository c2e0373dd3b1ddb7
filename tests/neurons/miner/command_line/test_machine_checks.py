"""The doctor's checks of a machine, with fake programs, GPUs and disks."""

import shutil
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.hardware.machine import Environment
from harness.measuring.runner import MeasurementError
from neurons.miner.command_line import machine_checks
from neurons.miner.command_line.machine_checks import ok
from neurons.runtime.machine import gpu_states
from tests.harness.samples import environment
from tests.neurons.miner.parts import make_settings
from tests.processes import put_program


def test_a_failure_of_the_child_that_imports_torch_is_reported() -> None:
    def broken(_: object) -> Environment:
        raise MeasurementError("the worker died with status 1", "crash", "x\nNo module 'torch'")

    (check,) = machine_checks.software("cpu", broken)
    assert (check.name, check.level) == ("torch", "failure")
    assert "No module 'torch'" in check.detail
    assert "scripts/install.sh" in check.remedy


def test_a_gpu_run_needs_a_cuda_build_and_triton() -> None:
    torch, triton = machine_checks.software("cuda", lambda _: environment())
    assert (torch.level, triton.level) == ("failure", "failure")
    complete = environment(device="cuda", cuda="13.0", triton="3.5.0", gpu="H200")
    torch, triton = machine_checks.software("cuda", lambda _: complete)
    assert (torch.level, triton.level) == ("ok", "ok")
    _, triton = machine_checks.software("cpu", lambda _: environment())
    assert triton.level == "ok"


def test_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "gpus", list)
    assert machine_checks.gpu("cpu").level == "ok"
    missing = machine_checks.gpu("cuda")
    assert (missing.level, "nvidia-smi" in missing.remedy) == ("failure", True)


class Unlike:
    """A fake NVML: one GPU has left the bus, another one has no memory of its own."""

    NVMLError, NVML_TEMPERATURE_GPU = OSError, 0
    nvmlInit = nvmlShutdown = staticmethod(lambda: None)
    nvmlSystemGetDriverVersion = staticmethod(lambda: "580.1")
    nvmlDeviceGetCount = staticmethod(lambda: 3)
    nvmlDeviceGetName = staticmethod("card {}".format)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 0:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        if gpu == 1:
            raise self.NVMLError("not supported")
        return SimpleNamespace(total=2**30, used=2**20)

    def nvmlDeviceGetTemperature(self, *_: int) -> int:
        raise self.NVMLError("not supported")

    nvmlDeviceGetPowerUsage = nvmlDeviceGetUtilizationRates = nvmlDeviceGetTemperature


def test_row_23_the_other_gpus_are_found_if_nvml_fails_for_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Unlike())
    found = machine_checks.gpu("cuda")
    assert (found.level, found.detail) == ("ok", "card 1, card 2 (1 GiB), driver 580.1")
    assert [state.get("memory_used_mib") for state in gpu_states()] == [None, None, 1.0]


def test_a_gpu_needs_a_c_compiler_and_the_headers(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither gcc nor clang" in machine_checks.compiler().detail
    (tmp_path / "clang").touch(mode=0o755)
    assert "Python.h is missing" in machine_checks.compiler().detail
    (tmp_path / "Python.h").touch()
    assert machine_checks.compiler() == ok("compiler", str(tmp_path / "clang"))


@pytest.mark.parametrize(
    ("output", "level"),
    [("git version 2.31.8", "failure"), ("git version 3.0.1", "ok"), ("", "failure")],
)
def test_git_must_be_new_enough(output, level, tmp_path, monkeypatch):
    program = put_program(tmp_path / "git", f"echo '{output}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_checks.git().level == level
    program.unlink()
    assert machine_checks.git().detail == "not found"


@pytest.mark.parametrize(("free", "level"), [(0.5e9, "failure"), (2e9, "warning"), (9e9, "ok")])
def test_disk(free: float, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=1e12, used=0, free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert machine_checks.disk(tmp_path / "not" / "yet" / "made").level == level


@pytest.mark.parametrize(
    ("name", "value", "absent", "remedy"),
    [
        ("metrics_port", 9464, "prometheus_client", "scripts/install.sh metrics"),
        ("tune_command", "no-such-optimiser --fast", None, "Name a program of the PATH"),
    ],
)
def test_settings_that_need_missing_programs_fail(
    tmp_path, monkeypatch, name, value, absent, remedy
):
    monkeypatch.setattr(machine_checks, "software", lambda device: iter(()))
    if absent:
        monkeypatch.setitem(sys.modules, absent, None)  # as if it were not installed
    settings = make_settings(tmp_path, **{name: value})
    failures = [one for one in machine_checks.machine(settings) if one.level == "failure"]
    assert [remedy in one.remedy for one in failures] == [True]


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("alert_command", "no-such-mailer -s quasar", "there is no program no-such-mailer"),
        ("journal_copy", "/no/such/mount", "cannot be written (No such file"),
        ("journal_copy", None, "is on the same disk as STATE_DIR"),
    ],
)
def test_settings_without_effect_are_warnings(tmp_path, monkeypatch, name, value, part):
    monkeypatch.setattr(machine_checks, "software", lambda device: iter(()))
    settings = make_settings(tmp_path / "state", **{name: value or tmp_path})
    checks = [one for one in machine_checks.machine(settings) if one.level != "ok"]
    found = [one for one in checks if part in one.detail]
    assert [one.level for one in found] == ["warning"], checks


def test_a_journal_copy_on_another_disk_is_accepted(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    here = Path.cwd()
    if other.stat().st_dev == here.stat().st_dev:
        pytest.skip("needs two file systems")
    assert machine_checks.journal_copy(other, here / "state").level == "ok"
