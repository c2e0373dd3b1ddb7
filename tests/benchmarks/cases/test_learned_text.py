"""Models that learn a text: what is held out, what is written, and what the page shows."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import torch

from benchmarks.cases import learned_text
from benchmarks.cases.learned_text import TEXT, TextRecipe, loss_of, split
from benchmarks.engine.commands import run_case
from benchmarks.engine.results import load
from benchmarks.models import choices
from benchmarks.report import learned as page
from quasar_kernels.blocks.language.model import LanguageModel, Sizes, next_token_loss
from tests.benchmarks.cases.one_process import one_process


def test_what_is_held_out_is_the_end_of_the_text_and_is_not_trained_on() -> None:
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


def test_the_command_writes_each_training_and_the_page_shows_them(tmp_path, monkeypatch) -> None:
    torch.set_num_threads(1)
    file = tmp_path / "text.json"
    one_process(monkeypatch)
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

    shown = page.text(run)
    assert "| Mamba-2 |" in shown
    assert f"{run.entries[0].figures['held_out']:.4f}" in shown
    drawn = ElementTree.fromstring(page.text_plot(run))  # noqa: S314 made above
    labels = {e.text for e in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Mamba-2", "RWKV-6 + Quasar"} <= labels
