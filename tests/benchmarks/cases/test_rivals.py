"""The comparison of forks, on small forks whose faults are known."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import rivals
from benchmarks.engine.results import Entry, Run
from harness.measuring.runner import MeasurementError, Options, measure
from tests.adversarial.test_cheats import make_tree
from tests.processes import HANG

TREES = {
    "future": ("operators", "reads_the_future"),
    "forgets": ("operators", "forgets_between_chunks"),
    "overflows": ("operators", "overflows"),
    "untrained": ("layers", "WithoutGradients"),
}
PROJECTION = "k_proj.weight"


@pytest.fixture(autouse=True)
def _honest_toy_as_this_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest = make_tree(tmp_path / "honest", "honest", "right")
    monkeypatch.setattr(rivals, "make_tree", lambda *_: honest)
    monkeypatch.setattr(rivals, "AT_ONCE", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run(*arguments: str) -> Run:
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", default="abc")
    rivals.options(parser)
    *_, last = rivals.measure(parser.parse_args(arguments))
    return last


def by_name(entries: list[Entry]) -> dict[str, dict[str, Entry]]:
    found: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        found.setdefault(entry.by, {})[str(entry.of.get("what", entry.of.get("tokens")))] = entry
    return found


@pytest.fixture
def _few_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time only the forks whose speed a test examines."""

    def timed_if_needed(tree: Path, *arguments: Any, **options: Any) -> Any:
        if tree.name not in ("honest", "broken"):
            raise MeasurementError("not timed", "stopped")
        return measure(tree, *arguments, **options)

    monkeypatch.setattr(rivals, "timed", timed_if_needed)


@pytest.mark.slow
@pytest.mark.usefixtures("_few_timed")
def test_each_fault_is_measured(tmp_path: Path) -> None:
    trees = {name: make_tree(tmp_path / name, *kind) for name, kind in TREES.items()}
    broken = make_tree(tmp_path / "broken", "honest", "right")
    (broken / "fla/layers/quasar.py").write_text("raise RuntimeError('no such GPU')\n")
    no_layer = make_tree(tmp_path / "other", "honest", "right")
    with (no_layer / "fla/ops/quasar/honest.py").open("a") as file:
        file.write(
            "\nclass QuasarAttention(torch.nn.Linear):\n"
            "    def __init__(self, hidden_size, **_):\n"
            "        super().__init__(hidden_size, hidden_size)\n"
            "    def forward(self, x): return super().forward(x), None, None\n"
        )
    named = {**trees, "broken": broken, "other": no_layer}
    pairs = [f"{name}={tree}" for name, tree in named.items()]
    done = run(*pairs, "--lengths", "64", "--checked", "256", "--trained", "64")
    speeds, checks = by_name(done.table("speed")), by_name(done.table("checks"))
    assert set(speeds) == set(checks) == {rivals.OURS, *named}

    assert speeds[rivals.OURS]["64"].figures["tokens_per_sec"] > 0
    assert "no such GPU" in (speeds["broken"]["64"].failure or "")
    assert checks["broken"]["process"].failure == "exit status 1"

    ours = checks[rivals.OURS]
    assert [e.failure for e in ours.values()] == [None] * 4, ours
    assert ours["operator"].errors["relative RMS"] < 5e-3  # bf16 inputs, fp32 arithmetic
    assert ours["layer"].errors["relative RMS"] < 1e-5
    assert ours["causality"].figures["seeing"] == 0
    assert ours["gradients"].figures == {"weights": 12, "without": 0}
    assert ours["gradients"].worst()[1] < 1e-4

    assert checks["future"]["causality"].figures["seeing"] > 0
    assert checks["forgets"]["operator"].errors["relative RMS"] > 0.1
    assert "not finite" in (checks["overflows"]["operator"].failure or "")
    untrained = checks["untrained"]["gradients"]
    assert untrained.texts["named"] == "k_proj.weight, k_conv1d.weight"
    assert untrained.errors[PROJECTION] == 1.0

    other = checks["other"]
    assert f"{PROJECTION}" in (other["layer"].failure or "")
    assert other["gradients"].figures == {"weights": 2, "without": 0}
    assert not other["gradients"].errors
    assert other["operator"].errors["relative RMS"] < 5e-3


@pytest.mark.nightly
def test_a_fork_that_never_ends_or_replaces_the_clock_gets_a_row(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "sleeps", "honest", "right")
    (tree / "fla/layers/quasar.py").write_text("import time\ntime.sleep(3600)\n")
    clock = make_tree(tmp_path / "clock", "timed", "PatchesTheClock")
    reasons = {
        tree: (1.0, "timeout: not done within 1 s"),
        clock: (HANG, "gate: the code under test replaced time.time"),
    }
    for one, (seconds, reason) in reasons.items():
        options = Options("cpu", seconds)
        found = rivals.time_tree("it", one, 64, options=options, gpu_lock=tmp_path / "lock")
        assert found.failure == reason
    (entry,) = rivals.check_tree("it", tree, argparse.Namespace(seconds=1.0), "cpu")
    assert (entry.of, entry.failure) == ({"what": "process"}, "killed after 1 s")


@pytest.mark.parametrize("wrong", ["fork", "=/tmp", "fork=/does/not/exist", "this project=/"])
def test_a_wrong_tree_is_named(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(wrong)
    assert repr(wrong) in capsys.readouterr().err or rivals.OURS in wrong
