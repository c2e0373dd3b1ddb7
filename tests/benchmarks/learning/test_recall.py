"""Models of equal size that learn to recall, and what their trainings leave."""

from __future__ import annotations

import torch

from benchmarks.learning import choices, recall
from benchmarks.learning.choices import CHOICES, equal_sizes, parameters
from benchmarks.learning.results import LearnedRecall
from benchmarks.recall.results import Task
from benchmarks.results import load
from quasar_kernels.blocks.language.model import LanguageModel, Sizes
from tests.benchmarks.learning.one_process import one_process


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
    monkeypatch.setattr(recall, "SMALL_TASK", Task(24, 32, 4, 4))
    monkeypatch.setattr(choices, "CHOICES", (("quasar",), ("rwkv6", "mamba2")))
    words = f"--out {file} --device cpu --seeds 1 --width 32 --steps 10".split()
    monkeypatch.setattr("sys.argv", ["recall", *words])
    recall.main()
    run = load(LearnedRecall, file)
    assert [t.mixers for t in run.trainings] == [("quasar",), ("rwkv6", "mamba2")]
    assert run.task == recall.SMALL_TASK
    for training in run.trainings:
        assert training.curve.steps == 10
        assert 0 < training.curve.recall < 1
        (loss,) = training.curve.losses
        assert 2 < loss < 4  # the first ten steps of 24 tokens: log(24) is 3.18
