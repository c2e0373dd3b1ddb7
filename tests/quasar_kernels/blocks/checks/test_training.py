"""The data and the end of the mini-training."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from quasar_kernels.blocks.checks.training import HELD_OUT, draw, train
from tests.quasar_kernels.blocks.checks.models import VOCABULARY

CPU = torch.device("cpu")


def test_no_step_trains_on_the_held_out_batch() -> None:
    held_out = draw(VOCABULARY, HELD_OUT, CPU)
    assert all(not torch.equal(draw(VOCABULARY, step, CPU), held_out) for step in range(1000))


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_training_ends_at_the_first_value_that_is_not_finite(what: str) -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.root = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
            self.spare = nn.Parameter(torch.ones(2))
            self.calls = 0

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            right = nn.functional.one_hot(tokens.roll(-1, 1), VOCABULARY)  # the next token
            logits = 10 * right * self.scale
            if self.calls == 3 and what == "loss":
                logits = logits.masked_fill(torch.arange(VOCABULARY) == 3, -math.inf)
            if self.calls == 3 and what == "gradient":
                logits = logits + right * self.root.sqrt()
            return logits

    model = Ends()
    history = train(model, VOCABULARY, 9, CPU)
    assert (len(history.losses), len(history.gradient_norms), model.calls) == (3, 3, 3)
    assert history.dead == (["root", "spare"] if what == "loss" else ["spare"])
    figures = history.losses if what == "loss" else history.gradient_norms
    assert [math.isfinite(figure) for figure in figures] == [True, True, False]


def test_from_the_third_on_each_token_depends_on_the_one_two_places_before() -> None:
    tokens = torch.cat([draw(16, seed, CPU) for seed in range(40)])
    pairs = torch.stack([tokens[:, :-2], tokens[:, 2:]], -1).reshape(-1, 2)
    table = torch.zeros(16, 16)
    table.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs)), accumulate=True)
    order = table.argmax(1)
    right = (order[tokens[:, :-2]] == tokens[:, 2:]).float().mean(0)
    # a tenth of the tokens is random, of which one in 16 is right by chance
    assert float(right.mean()) == pytest.approx(1 - 0.1 * 15 / 16, abs=0.01)
    assert torch.equal(draw(16, 1, CPU), draw(16, 1, CPU))
