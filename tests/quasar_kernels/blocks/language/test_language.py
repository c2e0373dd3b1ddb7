"""Training a model over bytes: its result, interruptions, sampling and errors."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess

import pytest
import torch
from torch.utils._pytree import tree_flatten

from quasar_kernels.blocks.language.__main__ import main
from quasar_kernels.blocks.language.model import LanguageModel, Sizes, next_token_loss, sampled
from quasar_kernels.blocks.language.settings import Recipe
from quasar_kernels.blocks.language.stopping import stop_on_signal
from quasar_kernels.blocks.language.training import Training, draw, read_text
from tests import PROJECT
from tests.processes import HANG, started, wait_for
from tests.small_fla import install_small_fla

SMALL = shlex.split("--width 16 --heads 2 --layers 1 --state 16 --tokens 24 --batch 2 --device cpu")


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
    """Compare nested values bit for bit."""
    (leaves, structure), (others, expected) = tree_flatten(found), tree_flatten(wanted)
    assert structure == expected
    for a, b in zip(leaves, others, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


def command(text, out, steps, *options):
    """Return the arguments of Python that train in a separate process."""
    words = ["-m", "quasar_kernels.blocks.language", "train", "--text", str(text)]
    return [*words, "--out", str(out), "--steps", str(steps), *SMALL, *options]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The environment of a training with one thread and the small fla."""
    path = os.pathsep.join([install_small_fla(tmp_path_factory.mktemp("host")), str(PROJECT)])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@pytest.mark.slow
def test_a_killed_training_resumes_bit_for_bit(text, tmp_path, quick):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    words = command(text, killed, 100000, "--save-seconds", "1")
    with started(*words, env=quick) as child:
        wait_for((killed / "model.pt").exists, child)
        child.kill()
        child.wait()
    done = len(checkpoint(killed)["losses"])
    assert done >= 1
    assert train(text, killed, done + 5) == 0
    assert train(text, whole, done + 5) == 0
    assert len(checkpoint(killed)["losses"]) == done + 5
    assert_equal(checkpoint(killed), checkpoint(whole))


@pytest.mark.slow
def test_a_signal_stops_a_training_after_its_step_and_the_printed_command_resumes(
    text, tmp_path, capsys, quick
):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    words = command(text, stopped, 100000)  # its first checkpoint is due after a minute
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(*words, env=quick, **output) as child:
        printed = [child.stdout.readline() for _ in range(5)]
        assert printed[-1].startswith("step 1 of 100,000: loss "), printed  # pipes are flushed
        child.terminate()
        rest, errors = child.communicate(timeout=HANG)
        assert child.returncode == 128 + signal.SIGTERM, errors
    done = len(checkpoint(stopped)["losses"])
    assert f"stopped after step {done:,} of 100,000" in rest
    again = shlex.split(rest.splitlines()[-1])
    assert again == ["python", *words]
    assert "stopping after this step" in errors
    again[again.index("100000")] = str(done + 3)
    assert main(again[3:]) == 0
    assert f"resuming from step {done:,} of {stopped}" in capsys.readouterr().out
    assert train(text, whole, done + 3) == 0
    assert_equal(checkpoint(stopped), checkpoint(whole))


def test_a_second_signal_interrupts_immediately():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signal() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_checkpoints_are_saved_periodically_after_a_stop_and_at_the_end(text, tmp_path):
    content, digest = read_text(text, 24)
    sizes, recipe = Sizes(width=16, heads=2, layers=1, mixers=("mamba2",)), Recipe(24, 2)
    path, saved = tmp_path / "model.pt", []
    training = Training(content, digest, path, sizes, recipe, torch.device("cpu"))

    def clock():
        return 20.0 * len(saved)

    def note(done, _loss):
        saved.append(len(torch.load(path)["losses"]) if path.exists() else 0)

    assert not training.run(9, 60, note, stopped=lambda: len(saved) == 8, clock=clock)
    assert saved == [0, 0, 0, 4, 4, 4, 7, 7]
    assert len(torch.load(path)["losses"]) == 8
    assert training.run(9, 60, note, clock=clock)
    assert len(torch.load(path)["losses"]) == 9


def test_training_reduces_the_loss_plots_it_and_the_model_can_be_sampled(text, tmp_path, capsys):
    assert train(text, tmp_path / "m", 60, "--mixers", "mamba2", "--rate", "0.01") == 0
    losses = checkpoint(tmp_path / "m")["losses"]
    assert losses[0] > 5.4
    assert losses[-1] < 2.5
    (path,) = re.findall(
        r'<path class="line" [^>]* d="M([^h"]+)"', (tmp_path / "m/loss.svg").read_text()
    )
    assert path.count("L") == 59
    capsys.readouterr()
    sample = ["sample", "--model", str(tmp_path / "m"), "--prompt", "the ", "--count", "30"]
    drawn = []
    for seed in "112":
        assert main([*sample, "--seed", seed]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].startswith("the ")


def test_sampling_at_temperature_0_returns_the_likeliest_tokens():
    model = LanguageModel(Sizes(32, 16, 2, 2, state=16)).double()
    prompt = torch.randint(32, (7,))
    tokens = prompt
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens[None])[0, -1:].argmax(-1)])
    assert torch.equal(sampled(model, prompt, 5, 0, 0), tokens[7:])
    for arguments, words in (
        ((prompt[:0], 5, 1, 0), "prompt is empty"),
        ((prompt, 5, -1, 0), "at least 0; got -1"),
    ):
        with pytest.raises(ValueError, match=words):
            sampled(model, *arguments)


def test_next_token_loss_and_logits_at_places():
    model = LanguageModel(Sizes(16, 16, 2, 1, ("quasar",)))
    tokens = torch.randint(16, (2, 9))
    logits = model(tokens)
    chances = logits.log_softmax(-1)
    wanted = -sum(chances[b, t, tokens[b, t + 1]] for b in range(2) for t in range(8)) / 16
    assert torch.allclose(next_token_loss(logits, tokens), wanted)
    places = torch.tensor([[3, 0], [8, 8]])
    assert torch.equal(model(tokens, places)[1, 0], logits[1, 8])


def test_seed_and_step_determine_a_batch():
    content = torch.arange(200, dtype=torch.uint8)
    first = draw(content, Recipe(tokens=8, batch=4), 3)
    assert torch.equal(first, draw(content, Recipe(tokens=8, batch=4), 3))
    assert not torch.equal(first, draw(content, Recipe(tokens=8, batch=4), 4))
    for seed in (1, -1, 1 << 32):
        assert not torch.equal(first, draw(content, Recipe(tokens=8, batch=4, seed=seed), 3))
    assert (first.diff() == 1).all()
    assert first.shape == (4, 9)


def test_errors_of_a_training_are_one_line(text, tmp_path, capsys):
    def error(*options, file=text):
        assert train(file, tmp_path / "a", 1, *options) == 1
        return capsys.readouterr().err

    assert "No such file" in error(file=tmp_path / "none")
    short = tmp_path / "short"
    short.write_bytes(b"x" * 24)
    assert "has 24 bytes, but a sequence needs 25" in error(file=short)
    assert "some of rwkv6, mamba2, quasar" in error("--mixers", "rwkv7")
    assert train(text, tmp_path / "a", 1, "--mixers", "quasar") == 0
    capsys.readouterr()
    assert "has another model and recipe: repeat" in error("--mixers", "mamba2", "--seed", "1")
    text.write_bytes(text.read_bytes() + b"!")
    assert "has another text" in error("--mixers", "quasar")
    (tmp_path / "a/model.pt").write_bytes(b"torn")
    assert "cannot be read" in error("--mixers", "quasar")
    assert main(["sample", "--model", str(tmp_path / "b"), "--device", "cpu"]) == 1
    assert "there is no" in capsys.readouterr().err
