"""Recall by mechanism: models of equal size, and what their trainings leave."""

from __future__ import annotations

import torch

from benchmarks.recall import mechanisms
from benchmarks.recall.mechanisms import CHOICES, parameters, sizes_of
from benchmarks.recall.results import Mechanisms, Recipe, Task
from benchmarks.results import load
from quasar_kernels.blocks.language.model import LanguageModel


def test_models_have_equally_many_parameters() -> None:
    task = Task(vocabulary=96, tokens=64, pairs=8, batch=4)
    recipe = Recipe(most_steps=2, width=32, heads=2)
    made = [sizes_of(mixers, task, recipe) for mixers in CHOICES]
    counts = [parameters(sizes) for sizes in made]
    assert max(counts) / min(counts) < 1.003
    assert made[-1].inner == 32 == min(sizes.inner or 0 for sizes in made)
    model = LanguageModel(made[0])
    assert sum(p.numel() for p in model.parameters()) == counts[0]


def test_the_command_writes_each_training(tmp_path, monkeypatch) -> None:
    torch.set_num_threads(1)
    file = tmp_path / "mechanisms.json"
    monkeypatch.setattr(mechanisms, "SMALL_TASK", Task(24, 32, 4, 4))
    monkeypatch.setattr(mechanisms, "CHOICES", (("quasar",), ("rwkv6", "mamba2")))
    words = f"--out {file} --device cpu --seeds 1 --width 32 --steps 10".split()
    monkeypatch.setattr("sys.argv", ["mechanisms", *words])
    mechanisms.main()
    run = load(Mechanisms, file)
    assert [t.mixers for t in run.trainings] == [("quasar",), ("rwkv6", "mamba2")]
    assert run.task == mechanisms.SMALL_TASK
    for training in run.trainings:
        assert training.curve.steps == 10
        assert 0 < training.curve.recall < 1
        (loss,) = training.curve.losses
        assert 2 < loss < 4  # the first ten steps of 24 tokens: log(24) is 3.18
