"""Models of equal size that learn to recall, and what their trainings leave."""

from __future__ import annotations

import torch

from benchmarks.cases import learned_recall
from benchmarks.engine.commands import run_case
from benchmarks.engine.results import load
from benchmarks.models import choices
from benchmarks.models.choices import CHOICES, equal_sizes, parameters
from benchmarks.models.task import Task
from quasar_kernels.blocks.language.model import LanguageModel, Sizes
from tests.benchmarks.cases.one_process import one_process


def test_models_have_equally_many_parameters() -> None:
    like = Sizes(vocabulary=96, width=32, heads=2, layers=2)
    made = [equal_sizes(mixers, like) for mixers in CHOICES]
    counts = [parameters(sizes) for sizes in made]
    assert max(counts) / min(counts) < 1.003
    assert made[-1].inner == 32 == min(sizes.inner or 0 for sizes in made)
    model = LanguageModel(made[0])
    assert sum(p.numel() for p in model.parameters()) == counts[0]


def test_the_command_writes_each_training(tmp_path, monkeypatch) -> None:
    torch.set_num_threads(1)
    file = tmp_path / "recall.json"
    one_process(monkeypatch)
    monkeypatch.setattr(learned_recall, "SMALL_TASK", Task(24, 32, 4, 4))
    monkeypatch.setattr(choices, "CHOICES", (("quasar",), ("rwkv6", "mamba2")))
    words = f"--out {file} --device cpu --seeds 1 --width 32 --steps 10".split()
    assert run_case(learned_recall, words) == 0
    run = load(file)
    assert [entry.of["mixers"] for entry in run.entries] == ["quasar", "rwkv6+mamba2"]
    assert run.settings["tokens"] == 32
    for entry in run.entries:
        assert entry.figures["steps"] == 10
        assert 0 < entry.figures["recall"] < 1
        (loss,) = entry.series["losses"]
        assert 2 < loss < 4  # the first ten steps of 24 tokens: log(24) is 3.18
