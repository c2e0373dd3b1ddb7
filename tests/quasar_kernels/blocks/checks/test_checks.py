"""Sound models pass the checks, and each kind of fault fails its check."""

from __future__ import annotations

import json
import re

import pytest
import torch

from harness.__main__ import main
from quasar_kernels.blocks import Backend, HybridBlock
from quasar_kernels.blocks.checks import stages
from quasar_kernels.blocks.checks.command import build, run_checks, still_at_work
from quasar_kernels.blocks.checks.findings import Verdict
from tests.processes import wait_for

CPU = torch.device("cpu")
MODELS = "tests.quasar_kernels.blocks.checks.models"


def failed(name, steps=100):
    """Return the stages and names of the checks that fail."""
    found = run_checks(name, build(f"{MODELS}:{name}"), steps, CPU)
    return {(f.gate, f.what) for f in found.findings if f.verdict is Verdict.FAIL}


def test_the_small_hybrid_passes_and_the_findings_are_written(tmp_path, capsys):
    file = tmp_path / "gates.json"
    assert main(["gates", "--device", "cpu", "--steps", "50", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["verdict"] == "PASS"
    assert {f["gate"] for f in written["findings"]} == {"G0", "G1", "G2", "G3", "G4"}
    assert {f["verdict"] for f in written["findings"]} == {"PASS"}
    loss = next(f["figures"] for f in written["findings"] if f["what"] == "loss")
    assert loss["fall"] > 0.3
    assert any("of log(64)" in f["told"] for f in written["findings"])
    out = capsys.readouterr().out
    assert out.count("\n") == len(written["findings"]) + 1
    assert out.endswith("PASS: rwkv6+mamba2+quasar on cpu\n")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Plain", set()),
        ("Leaking", {("G1", "causal")}),
        ("Confident", {("G2", "entropy at the start")}),
        ("Unused", {("G3", "dead parameters")}),
        ("Memoryless", {("G3", "loss"), ("G3", "dead parameters")}),
        ("NaNLater", {("G3", "loss"), ("G3", "gradients")}),
        ("Broken", {("G1", "runs")}),
    ],
)
def test_a_fault_fails_only_its_checks(name, what):
    assert failed(name) == what


def test_nan_fails_every_numerical_check():
    numerical = ("G1", "finite"), ("G1", "causal"), ("G3", "loss"), ("G3", "gradients")
    assert failed("NaN", 2) >= {*numerical, ("G2", "entropy at the start")}


def test_a_dead_branch_fails():
    what = failed("dead", 3)
    figures = "RMS added", "gradient norms", "without quasar"
    assert what >= {("G3", "dead parameters"), *(("G4", f"blocks.0 {f}") for f in figures)}
    assert ("G4", "blocks.0 without mamba2") not in what


def test_the_model_is_not_changed():
    model = build(f"{MODELS}:hybrid")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    run_checks("hybrid", model, 2, CPU)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "on_gpu", "verdict"),
    [("torch", True, Verdict.WARN), ("triton", True, Verdict.PASS), ("torch", False, Verdict.PASS)],
)
def test_a_gpu_without_kernels_is_a_warning(monkeypatch, name, on_gpu, verdict):
    model = build("quasar")

    def backends(block, dtype):
        assert dtype == (torch.bfloat16 if on_gpu else None)  # autocast's dtype
        return {"x": Backend(name, "why", "do")}

    monkeypatch.setattr(HybridBlock, "backends", backends)
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu)
    (finding,) = stages.kernels(model)
    assert (finding.verdict, finding.told) == (verdict, f"{name}: why; do")


def test_the_exit_status_of_a_failing_model_is_1(capsys):
    assert main(["gates", "--model", f"{MODELS}:Broken", "--steps", "1"]) == 1
    assert "G1  FAIL  runs: it raises RuntimeError: no such kernel" in capsys.readouterr().out


def test_a_missing_gpu_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["gates", "--device", "cuda"])
    assert ended.value.code == 2
    assert "--device cuda: torch finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("rwkv7", "some of rwkv6, mamba2, quasar"),
        ("no_such:model", "No module named 'no_such'; name a function"),
        (f"{MODELS}:none", "has no attribute 'none'"),
        ("builtins:int", "returned int; it must return a torch module"),
        (f"{MODELS}:without_vocabulary", "returned Linear; it must return a torch module"),
    ],
)
def test_an_invalid_model_is_a_usage_error(model, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["gates", "--model", model])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err.replace("\n", " ")


def test_a_long_check_reports_that_it_continues(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""

    def has_said() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return said.count("\n") >= 2

    with still_at_work(["one", "two"], seconds=0.01):
        wait_for(has_said)
    assert re.fullmatch(r"(still at work after \d+ s; checks done: 2\n)+", said), said
