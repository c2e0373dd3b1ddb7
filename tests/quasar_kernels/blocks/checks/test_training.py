"""The mini-training against an independent loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from quasar_kernels.blocks.checks.training import HELD_OUT, draw, train
from tests.quasar_kernels.blocks.checks.models import VOCABULARY

CPU = torch.device("cpu")


def test_no_step_trains_on_the_batch_that_is_held_out() -> None:
    held_out = draw(VOCABULARY, HELD_OUT, CPU)
    assert all(not torch.equal(draw(VOCABULARY, step, CPU), held_out) for step in range(1000))


@pytest.mark.parametrize("what", ["loss", "infinite", "nan"])
def test_a_training_ends_at_the_first_figure_that_is_not_finite(what: str) -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.root = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
            self.spare = nn.Parameter(torch.ones(2))
            self.calls = 0

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            right = nn.functional.one_hot(tokens.roll(-1, 1), VOCABULARY)  # it sees what follows
            logits = 10 * right * self.scale
            if self.calls == 3 and what == "loss":
                logits = logits.masked_fill(torch.arange(VOCABULARY) == 3, -math.inf)
            if self.calls == 3 and what != "loss":
                logits = logits + right * self.root.sqrt() * (0.0 if what == "nan" else 1.0)
            return logits

    model = Ends()
    course = train(model, VOCABULARY, 9, CPU)
    assert (len(course.losses), len(course.gradient_norms), model.calls) == (3, 3, 3)
    assert course.dead == (["root", "spare"] if what == "loss" else ["spare"])
    assert course.losses[0] < 0.1
    figures = course.losses if what == "loss" else course.gradient_norms
    others = course.gradient_norms if what == "loss" else course.losses
    assert [math.isfinite(figure) for figure in figures] == [True, True, False]
    assert all(math.isfinite(figure) for figure in others)


def test_each_token_follows_from_the_one_before_the_last_from_the_third_on() -> None:
    tokens = torch.cat([draw(16, seed, CPU) for seed in range(40)])
    pairs = torch.stack([tokens[:, :-2], tokens[:, 2:]], -1).reshape(-1, 2)
    table = torch.zeros(16, 16)
    table.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs)), accumulate=True)
    order = table.argmax(1)
    right = (order[tokens[:, :-2]] == tokens[:, 2:]).float().mean(0)
    assert float(right.min()) > 0.85  # a tenth is drawn, of which one in 16 is right by chance
    assert float(right.mean()) == pytest.approx(1 - 0.1 * 15 / 16, abs=0.01)
    assert tokens.shape == (320, 32)
    assert torch.equal(tokens.unique(), torch.arange(16))
    assert not torch.equal(draw(16, 1, CPU), draw(16, 2, CPU))
    assert torch.equal(draw(16, 1, CPU), draw(16, 1, CPU))
