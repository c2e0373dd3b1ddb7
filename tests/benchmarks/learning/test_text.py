"""Models that learn a text: what is held out, what is written, and what the page shows."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import torch

from benchmarks.learning import choices, page, text
from benchmarks.learning.results import LearnedText, TextRecipe
from benchmarks.learning.text import loss_of, split
from benchmarks.results import load
from quasar_kernels.blocks.language.model import LanguageModel, Sizes, next_token_loss
from tests.benchmarks.learning.one_process import one_process


def test_what_is_held_out_is_the_end_of_the_text_and_is_not_trained_on() -> None:
    kept, rest = split()
    assert bytes(torch.cat([kept, rest]).tolist()) == text.TEXT.read_bytes()
    assert 0.099 < len(rest) / (len(kept) + len(rest)) < 0.101


def test_the_held_out_loss_is_the_mean_over_whole_sequences() -> None:
    torch.manual_seed(0)
    model = LanguageModel(Sizes(width=16, heads=2, layers=1, mixers=("quasar",), inner=16))
    recipe = TextRecipe(tokens=8, batch=2)
    data = torch.arange(8 * 3 + 5, dtype=torch.uint8)
    each = [next_token_loss(model(x.long()[None]), x.long()[None]) for x in data[:24].view(3, 8)]
    mean = torch.stack(each).mean().item()
    assert math.isclose(loss_of(model, data, recipe), mean, rel_tol=1e-5)


def test_the_command_writes_each_training_and_the_page_shows_them(tmp_path, monkeypatch) -> None:
    torch.set_num_threads(1)
    file = tmp_path / "text.json"
    one_process(monkeypatch)
    kept, rest = split()
    monkeypatch.setattr(text, "split", lambda: (kept, rest[:200]))
    monkeypatch.setattr(choices, "CHOICES", (("mamba2",), ("rwkv6", "quasar")))
    words = f"--out {file} --device cpu --seeds 2".split()
    sizes = ["--width", "16", "--layers", "1", "--steps", "20", "--tokens", "16", "--batch", "2"]
    monkeypatch.setattr("sys.argv", ["text", *words, *sizes])
    text.main()
    run = load(LearnedText, file)
    assert {(t.mixers, t.seed) for t in run.trainings} == {
        (mixers, seed) for mixers in choices.CHOICES for seed in (0, 1)
    }
    for training in run.trainings:
        first, last = training.losses
        assert last < first < 1.1 * math.log(256)
        assert 2 < training.held_out < math.log(256)

    monkeypatch.setattr(page, "TEXT", file)
    monkeypatch.setattr(page, "PLOTS", {page.RECALL: tmp_path / "r.svg", file: tmp_path / "t.svg"})
    shown = page.sections()["text"]
    assert "| Mamba-2 |" in shown
    assert f"{run.trainings[0].held_out:.4f}" in shown
    drawn = ElementTree.fromstring(page.plots()[tmp_path / "t.svg"])  # noqa: S314 made above
    labels = {e.text for e in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Mamba-2", "RWKV-6 + Quasar"} <= labels
