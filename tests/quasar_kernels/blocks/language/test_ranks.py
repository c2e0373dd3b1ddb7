"""Training by several processes has the losses of one, and any number of them can resume it."""

from __future__ import annotations

import os
import pydoc_data.topics

import pytest
import torch

from quasar_kernels.blocks.language.__main__ import main
from tests.processes import run_python

pytestmark = pytest.mark.slow

SIZES = [
    *("--width", "32", "--heads", "2", "--layers", "1", "--state", "16"),
    *("--tokens", "50", "--batch", "3", "--device", "cpu"),
]


def train(out, steps, ranks=0, *options):
    """Train up to `steps` steps in total, by `ranks` processes of torchrun or by one without it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*(torchrun if ranks else ()), "-m", "quasar_kernels.blocks.language", "train"]
    text = pydoc_data.topics.__file__
    done = run_python(*command, "--text", text, "--out", out, "--steps", steps, *SIZES, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(out):
    return torch.tensor(torch.load(out / "model.pt")["losses"])


@pytest.mark.skipif(not os.environ.get("QUASAR_NIGHTLY"), reason="a minute: make nightly")
def test_losses_do_not_depend_on_the_number_of_ranks(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    train(alone, 4)
    train(together, 2, 4, "--sequence-ranks", 2, "--data-ranks", 2)
    assert "resuming from step 2" in train(together, 4)
    torch.testing.assert_close(losses(together), losses(alone), rtol=1e-5, atol=0)


def test_without_torchrun_the_error_names_its_command(tmp_path, capsys):
    words = ["train", "--text", __file__, "--out", str(tmp_path), *SIZES, "--sequence-ranks", "2"]
    assert main(words) == 1
    assert "torchrun --nproc_per_node 2" in capsys.readouterr().err
