"""Training a model of bytes: what it learns, a kill in between, sampling, and its errors."""

from __future__ import annotations

import os

import pytest
import torch

from quasar_kernels.blocks.language.__main__ import loss_curve, main
from quasar_kernels.blocks.language.checkpoint import Recipe
from quasar_kernels.blocks.language.model import LanguageModel, Sizes, next_token_loss, sampled
from quasar_kernels.blocks.language.training import draw
from tests.processes import started, wait_for

SMALL = ["--width", "16", "--heads", "2", "--layers", "1", "--state", "16", "--tokens", "24",
         "--batch", "2", "--device", "cpu"]  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 20)
    return path


def train(text, out, steps, *options):
    words = ["--text", str(text), "--out", str(out), "--steps", str(steps), *SMALL, *options]
    return main(["train", *words])


def checkpoint(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def assert_equal(found, wanted):
    """Bit for bit, whatever is nested in what."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_equal(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_equal(a, b)
    else:
        assert found == wanted


def test_a_killed_training_goes_on_bit_for_bit(text, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    words = ["-m", "quasar_kernels.blocks.language", "train", "--text", str(text), "--out",
             str(killed), "--steps", "100000", "--save-every", "2", *SMALL]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with started(*words, env=environment) as child:
        wait_for((killed / "model.pt").exists, child=child)
        child.kill()
        child.wait()
    done = len(checkpoint(killed)["losses"])
    assert done >= 2
    assert train(text, killed, done + 5) == 0
    assert train(text, whole, done + 5) == 0
    assert len(checkpoint(killed)["losses"]) == done + 5
    assert_equal(checkpoint(killed), checkpoint(whole))


def test_it_learns_a_text_draws_its_loss_and_samples(text, tmp_path, capsys):
    assert train(text, tmp_path / "m", 60, "--mixers", "mamba2", "--rate", "0.01") == 0
    losses = checkpoint(tmp_path / "m")["losses"]
    assert losses[0] > 5.4
    assert losses[-1] < 2.5
    assert (tmp_path / "m/loss.svg").read_text().count("<circle") == 60
    assert "going on" not in capsys.readouterr().err
    sample = ["sample", "--model", str(tmp_path / "m"), "--prompt", "the ", "--count", "30"]
    drawn = []
    for seed in "112":
        assert main([*sample, "--seed", seed]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].startswith("the ")


def test_sampling_without_temperature_is_the_likeliest_token_of_whole_calls():
    model = LanguageModel(Sizes(32, 16, 2, 2, state=16)).double()
    prompt = torch.randint(32, (7,))
    tokens = prompt
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens[None])[0, -1:].argmax(-1)])
    assert torch.equal(sampled(model, prompt, 5, 0, 0), tokens[7:])
    for arguments, words in (((prompt[:0], 5, 1, 0), "prompt is empty"),
                             ((prompt, 5, -1, 0), "from 0 up; got -1")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            sampled(model, *arguments)


def test_the_loss_is_of_the_next_token_and_places_are_gathered():
    model = LanguageModel(Sizes(16, 16, 2, 1, ("quasar",)))
    tokens = torch.randint(16, (2, 9))
    logits = model(tokens)
    chances = logits.log_softmax(-1)
    wanted = -sum(chances[b, t, tokens[b, t + 1]] for b in range(2) for t in range(8)) / 16
    assert torch.allclose(next_token_loss(logits, tokens), wanted)
    places = torch.tensor([[3, 0], [8, 8]])
    assert torch.equal(model(tokens, places)[1, 0], logits[1, 8])


def test_batches_follow_from_the_seed_and_the_step_alone():
    content = torch.arange(200, dtype=torch.uint8)
    first = draw(content, Recipe(tokens=8, batch=4), 3)
    assert torch.equal(first, draw(content, Recipe(tokens=8, batch=4), 3))
    assert not torch.equal(first, draw(content, Recipe(tokens=8, batch=4), 4))
    for seed in (1, -1, 1 << 32):
        assert not torch.equal(first, draw(content, Recipe(tokens=8, batch=4, seed=seed), 3))
    assert (first.diff() == 1).all()
    assert first.shape == (4, 9)


def test_the_curve_has_means_of_equal_parts():
    svg = loss_curve([4.0] * 150 + [2.0] * 51)
    assert svg.count("<circle") == 67


def test_what_cannot_be_trained_is_told_in_a_line(text, tmp_path, capsys):
    def told(*options, file=text, folder="a"):
        assert train(file, tmp_path / folder, 1, *options) == 1
        return capsys.readouterr().err

    assert "No such file" in told(file=tmp_path / "none")
    short = tmp_path / "short"
    short.write_bytes(b"x" * 24)
    assert "has 24 bytes, and a sequence takes 25" in told(file=short)
    assert "some of rwkv6, mamba2, quasar" in told("--mixers", "rwkv7")
    assert train(text, tmp_path / "a", 1, "--mixers", "quasar") == 0
    capsys.readouterr()
    assert "of another model and recipe: repeat" in told("--mixers", "mamba2", "--seed", "1")
    text.write_bytes(text.read_bytes() + b"!")
    assert "of another text" in told("--mixers", "quasar")
    (tmp_path / "a/model.pt").write_bytes(b"torn")
    assert "cannot be read" in told("--mixers", "quasar")
    assert main(["sample", "--model", str(tmp_path / "b"), "--device", "cpu"]) == 1
    assert "there is no" in capsys.readouterr().err
