"""The example of a language model: its losses, resumed and parallel trainings, and sampling."""

import pydoc_data.topics

import pytest
import torch
from torch.utils._pytree import tree_flatten

from quasar_kernels.blocks.language import LanguageModel, Recipe, Sizes, Training, main
from tests.processes import run_python

SIZES = Sizes(width=16, heads=2, layers=1, state=16)
RECIPE = Recipe(tokens=24, batch=2)
SMALL = "width=16", "heads=2", "layers=1", "state=16", "tokens=24", "batch=2", "device=cpu"
OPTIONS = [f"--{option}" for option in SMALL]
TEXT = b"the quick brown fox jumps over the lazy dog. " * 20


def trained(steps, sizes=SIZES, recipe=RECIPE, checkpoint=None):
    training = Training(TEXT, sizes, recipe, torch.device("cpu"))
    if checkpoint is not None:
        training.resume(checkpoint)
    for _ in range(steps):
        training.step()
    return training


def test_a_resumed_training_has_the_same_bits(tmp_path):
    whole, first = trained(5), tmp_path / "first.pt"
    trained(3).save(first)
    trained(2, checkpoint=first).save(tmp_path / "resumed.pt")
    whole.save(tmp_path / "whole.pt")
    (found, structure), (wanted, expected) = (
        tree_flatten(torch.load(tmp_path / name, weights_only=True))
        for name in ("resumed.pt", "whole.pt")
    )
    assert structure == expected
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
    with pytest.raises(ValueError, match="differs in recipe: choose another --out"):
        trained(0, recipe=RECIPE._replace(seed=1), checkpoint=first)


def test_a_loss_is_the_mean_cross_entropy_of_the_next_bytes():
    training = trained(0)
    tokens = training.draw(0)
    assert tokens.shape == (2, 25)
    assert all(bytes(row.tolist()) in TEXT for row in tokens)
    chances = training.model(tokens[:, :-1]).log_softmax(-1)
    wanted = -sum(chances[b, t, tokens[b, t + 1]] for b in range(2) for t in range(24)) / 48
    assert training.step() == pytest.approx(wanted.item(), rel=1e-5)
    assert not torch.equal(training.draw(0), training.draw(1))


def test_the_command_trains_a_model_that_can_be_sampled(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(TEXT)
    train = ["train", "--text", str(text), "--out", str(tmp_path), *OPTIONS, "--mixers", "mamba2"]
    assert main([*train, "--rate", "0.01", "--steps", "60"]) == 0
    losses = torch.load(tmp_path / "model.pt")["losses"]
    assert losses[0] > 5.4
    assert losses[-1] < 2.5, losses
    sample = ["sample", "--model", str(tmp_path), "--prompt", "the ", "--count", "30"]
    capsys.readouterr()
    drawn = []
    for seed in "112":
        assert main([*sample, "--device", "cpu", "--seed", seed]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].startswith("the ")
    assert main([*train, "--tokens", "900"]) == 1
    assert "the text has 900 bytes, but --tokens is 900" in capsys.readouterr().err


def test_a_model_continues_from_its_states():
    model = LanguageModel(SIZES).double()
    tokens = torch.randint(256, (2, 9))
    with torch.no_grad():
        _, states = model.continued(tokens[:, :5])
        rest, _ = model.continued(tokens[:, 5:], states)
        assert torch.allclose(rest, model(tokens)[:, 5:])


@pytest.mark.slow
@pytest.mark.nightly
def test_losses_do_not_depend_on_the_number_of_processes(tmp_path):
    def losses(out, steps, processes):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [*(torchrun if processes else ()), "-m", "quasar_kernels.blocks.language"]
        files = ["train", "--text", pydoc_data.topics.__file__, "--out", out]
        done = run_python(*command, *files, "--steps", steps, *OPTIONS)
        assert done.returncode == 0, done.stderr
        return torch.tensor(torch.load(out / "model.pt")["losses"])

    alone, together = tmp_path / "alone", tmp_path / "together"
    losses(together, 2, 4)
    found, wanted = losses(together, 4, 3), losses(alone, 4, 0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
