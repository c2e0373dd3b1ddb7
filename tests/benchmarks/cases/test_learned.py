"""Models of equal size that are trained to recall or on a text, and their data."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.cases import learned_recall, learned_text
from benchmarks.cases.learned_text import TEXT, TextRecipe, loss_of, split
from benchmarks.engine.commands import run_case
from benchmarks.engine.results import load
from benchmarks.models import choices
from benchmarks.models.choices import CHOICES, equal_sizes, parameters
from benchmarks.models.task import Task
from quasar_kernels.blocks.language.model import LanguageModel, Sizes, next_token_loss


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in a thread, because a new process would first import torch."""
    torch.set_num_threads(1)
    monkeypatch.setattr(choices, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))


def test_models_have_equally_many_parameters() -> None:
    like = Sizes(vocabulary=96, width=32, heads=2, layers=2)
    made = [equal_sizes(mixers, like) for mixers in CHOICES]
    counts = [parameters(sizes) for sizes in made]
    assert max(counts) / min(counts) < 1.003
    assert made[-1].inner == 32 == min(sizes.inner or 0 for sizes in made)
    model = LanguageModel(made[0])
    assert sum(p.numel() for p in model.parameters()) == counts[0]


@pytest.mark.usefixtures("one_process")
def test_each_model_is_trained_to_recall(tmp_path, monkeypatch) -> None:
    file = tmp_path / "recall.json"
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
        assert 2 < loss < 4  # ten steps with a vocabulary of 24: log(24) is 3.18


def test_the_end_of_the_text_is_held_out() -> None:
    kept, rest = split()
    assert bytes(torch.cat([kept, rest]).tolist()) == TEXT.read_bytes()
    assert 0.099 < len(rest) / (len(kept) + len(rest)) < 0.101


def test_the_held_out_loss_is_the_mean_over_whole_sequences() -> None:
    torch.manual_seed(0)
    model = LanguageModel(Sizes(width=16, heads=2, layers=1, mixers=("quasar",), inner=16))
    recipe = TextRecipe(tokens=8, batch=2)
    data = torch.arange(8 * 3 + 5, dtype=torch.uint8)
    each = [next_token_loss(model(x.long()[None]), x.long()[None]) for x in data[:24].view(3, 8)]
    mean = torch.stack(each).mean().item()
    assert math.isclose(loss_of(model, data, recipe), mean, rel_tol=1e-5)


@pytest.mark.usefixtures("one_process")
def test_each_model_is_trained_on_a_text_from_each_seed(tmp_path, monkeypatch) -> None:
    file = tmp_path / "text.json"
    kept, rest = split()
    monkeypatch.setattr(learned_text, "split", lambda: (kept, rest[:200]))
    monkeypatch.setattr(choices, "CHOICES", (("mamba2",), ("rwkv6", "quasar")))
    words = f"--out {file} --device cpu --seeds 2".split()
    sizes = ["--width", "16", "--layers", "1", "--steps", "20", "--tokens", "16", "--batch", "2"]
    assert run_case(learned_text, [*words, *sizes]) == 0
    run = load(file)
    assert {(entry.of["mixers"], entry.of["seed"]) for entry in run.entries} == {
        (mixers, seed) for mixers in ("mamba2", "rwkv6+quasar") for seed in (0, 1)
    }
    for entry in run.entries:
        first, last = entry.series["losses"]
        assert last < first < 1.1 * math.log(256)
        assert 2 < entry.figures["held_out"] < math.log(256)
