"""The data and the end of the mini-training."""

from __future__ import annotations

import math

import torch

from quasar_kernels.blocks.checks.training import HELD_OUT, draw, train
from tests.quasar_kernels.blocks.checks.models import VOCABULARY, NaNLater

CPU = torch.device("cpu")


def test_no_step_trains_on_the_held_out_batch() -> None:
    held_out = draw(VOCABULARY, HELD_OUT, CPU)
    assert all(not torch.equal(draw(VOCABULARY, step, CPU), held_out) for step in range(3))


def test_a_training_ends_at_the_first_loss_that_is_not_finite() -> None:
    history = train(NaNLater(), VOCABULARY, 50, CPU)
    assert 1 < len(history.losses) == len(history.gradient_norms) < 50
    assert [math.isfinite(loss) for loss in history.losses].index(False) == len(history.losses) - 1
