"""The choice between the portable fused kernels and library products."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from fla.ops.quasar.layer import timed_choice as choice
from fla.ops.quasar.layer.call import Projected
from fla.ops.quasar.triton_kernels.autotune import Gpu

X = torch.zeros(1, 1, 512)


def kernels(factor: float) -> SimpleNamespace:
    """Kernels whose results are those of a product times `factor`."""

    def project(program, call, x, weights, save, output):
        qkv = torch.nn.functional.linear(x, weights.q) * factor
        return Projected(qkv, weights.beta_log, x[0], ())

    return SimpleNamespace(
        project=project,
        output=lambda program, call, o, p, shape: o * factor,
        find_program=lambda x, dtype: "program",
    )


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A GPU without Hopper's instructions, an empty cache; `.times` are what timing returns."""

    class Machine:
        fused, library, folder = kernels(1), kernels(1.001), tmp_path / "cache"
        times = {"fused": 1.0, "library": 2.0}  # noqa: RUF012
        measured = 0
        capturing = False
        capability = (8, 0)

        def choose(self):
            monkeypatch.setattr(choice, "_chosen", {})  # as in a new process
            monkeypatch.setattr(choice, "portable", self.fused)
            return choice.portable_is_faster(X, torch.bfloat16)

    def milliseconds(run, which):
        machine.measured += 1
        return machine.times["fused" if which is machine.fused else "library"]

    machine = Machine()
    monkeypatch.setenv("QUASAR_CACHE_DIR", str(machine.folder))
    monkeypatch.setattr(choice, "TOKENS", 8)
    monkeypatch.setattr(choice, "library", machine.library)
    monkeypatch.setattr(choice, "is_hopper", lambda x: False)
    monkeypatch.setattr(choice, "_milliseconds", milliseconds)
    monkeypatch.setattr(Gpu, "of", classmethod(lambda cls, device: Gpu("NVIDIA X", "8.0")))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: machine.capability)
    return machine


@pytest.mark.parametrize(("fused", "faster"), [(1.9, True), (1.99, False), (3.0, False)])
def test_fused_stages_need_a_clear_gain_and_are_timed_once(machine, caplog, fused, faster):
    machine.times["fused"] = fused
    with caplog.at_level(logging.INFO, "fla.ops.quasar"):
        assert machine.choose() is faster
    (record,) = caplog.records
    assert f"fused {fused:.2f} ms, library 2.00 ms" in record.getMessage()
    assert str(machine.folder) in record.getMessage()
    before = machine.measured
    assert before > 0
    assert machine.choose() is faster
    assert machine.measured == before
    (path,) = machine.folder.glob("layer-*.json")
    path.write_text("{")  # torn by a full disk
    assert machine.choose() is faster
    assert machine.measured == 2 * before
    assert json.loads(path.read_text())["fused_ms"] == fused


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_kernels_with_other_results_are_not_used(machine, caplog, factor):
    machine.fused = kernels(factor)
    assert machine.choose() is False
    assert "differ by" in caplog.text
    assert not list(machine.folder.glob("*.json"))


def test_kernels_that_cannot_run_are_not_used(machine, caplog):
    machine.fused.find_program = lambda x, dtype: None
    assert machine.choose() is False
    assert "cannot run on this GPU" in caplog.text


@pytest.mark.parametrize(
    "without", ["switch", "capture", "old", "hopper"], ids=lambda reason: reason
)
def test_nothing_is_measured(machine, monkeypatch, without):
    if without == "switch":
        monkeypatch.setenv("QUASAR_AUTOTUNE", "0")
    machine.capturing = without == "capture"
    if without == "old":
        machine.capability = (7, 5)
    if without == "hopper":
        monkeypatch.setattr(choice, "is_hopper", lambda x: True)
    assert machine.choose() is False
    assert machine.measured == 0
    if without == "capture":  # a later call may choose
        machine.capturing = False
        assert choice.portable_is_faster(X, torch.bfloat16) is True
