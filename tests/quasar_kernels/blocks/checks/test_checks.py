"""Sound models of blocks pass the checks, and each kind of fault fails its check."""

from __future__ import annotations

import json

import pytest
import torch

from harness.__main__ import main
from quasar_kernels.blocks import MIXERS, Backend, HybridBlock
from quasar_kernels.blocks.checks import stages
from quasar_kernels.blocks.checks.command import build, look
from quasar_kernels.blocks.checks.findings import Verdict

CPU = torch.device("cpu")
MODELS = "tests.quasar_kernels.blocks.checks.models"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def found(name, steps=100):
    return look(name, build(f"{MODELS}:{name}"), steps, CPU)


def failed(name, steps=100):
    """What fails, by stage and name."""
    return {(f.gate, f.what) for f in found(name, steps).findings if f.verdict is Verdict.FAIL}


def test_the_small_hybrid_passes_and_the_file_says_so(tmp_path, capsys):
    file = tmp_path / "gates.json"
    assert main(["gates", "--device", "cpu", "--steps", "50", "--json", str(file)]) == 0
    said = json.loads(file.read_text())
    assert said["verdict"] == "PASS"
    assert {f["gate"] for f in said["findings"]} == {"G0", "G1", "G2", "G3", "G4"}
    assert {f["verdict"] for f in said["findings"]} == {"PASS"}
    loss = next(f["figures"] for f in said["findings"] if f["what"] == "loss")
    assert loss["fall"] > 0.3
    assert any("of log(64)" in f["told"] for f in said["findings"])
    out = capsys.readouterr().out
    assert out.count("\n") == len(said["findings"]) + 1
    assert out.endswith("PASS: rwkv6+mamba2+quasar on cpu\n")


@pytest.mark.parametrize("mixer", MIXERS)
def test_each_mixer_alone_passes(mixer):
    assert look(mixer, build(mixer), 60, CPU).verdict is Verdict.PASS


def test_a_plain_model_passes_what_it_has():
    model = found("Plain")
    assert model.verdict is Verdict.PASS, model
    assert not [f for f in model.findings if f.gate == "G4"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Leaking", {("G1", "causal")}),
        ("LeakingAtTheEnd", {("G1", "causal")}),
        ("Loud", {("G2", "entropy at the start")}),
        ("Unused", {("G3", "dead parameters")}),
        ("Deaf", {("G3", "loss"), ("G3", "dead parameters")}),
        ("NaNLater", {("G3", "loss"), ("G3", "gradients")}),
        ("Broken", {("G1", "runs")}),
    ],
)
def test_what_is_wrong_fails_its_check_and_no_other(name, what):
    assert failed(name) == what


def test_nan_passes_nothing_that_computes():
    assert failed("NaN", 2) >= {
        ("G1", "finite"),
        ("G1", "causal"),
        ("G2", "entropy at the start"),
        ("G3", "loss"),
        ("G3", "gradients"),
    }


def test_a_dead_branch_fails():
    what = failed("dead", 3)
    assert {
        ("G4", "blocks.0 RMS added"),
        ("G4", "blocks.0 gradient norms"),
        ("G4", "blocks.0 without quasar"),
    } <= what
    assert ("G4", "blocks.0 without mamba2") not in what
    assert ("G3", "dead parameters") in what


def test_the_model_stays_as_it_is():
    model = build(f"{MODELS}:hybrid")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    look("hybrid", model, 2, CPU)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "remedy", "on_gpu", "verdict"),
    [
        ("torch", "do", True, Verdict.WARN),
        ("cuda", "", True, Verdict.PASS),
        ("triton", "", True, Verdict.PASS),
        ("torch", "do", False, Verdict.PASS),
    ],
)
def test_a_gpu_without_kernels_is_a_warning(monkeypatch, name, remedy, on_gpu, verdict):
    model, asked = build("quasar"), []

    def backends(block, dtype):
        asked.append(dtype)
        return {"x": Backend(name, "why", remedy)}

    monkeypatch.setattr(HybridBlock, "backends", backends)
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu)
    (finding,) = stages.kernels(model)
    told = f"{name}: why; {remedy}" if remedy else f"{name}: why"
    assert (finding.verdict, finding.told) == (verdict, told)
    assert asked == [torch.bfloat16 if on_gpu else None]  # as autocast has it there


def test_a_failing_model_s_status_is_one(capsys):
    assert main(["gates", "--model", f"{MODELS}:Broken", "--steps", "1"]) == 1
    assert "G1  FAIL  runs: it raises RuntimeError: no such kernel" in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_usage(monkeypatch, capsys):
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
        (f"{MODELS}:number", "returned int; it must return a torch module"),
        (f"{MODELS}:hybrid:x", "has no attribute 'hybrid:x'"),
        (f"{MODELS}:wordless", "returned Linear; it must return a torch module"),
    ],
)
def test_what_is_no_model_is_usage(model, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["gates", "--model", model])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err.replace("\n", " ")
