"""The limits of the model checks, with values on both sides of each, and the mini-training."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from quasar_kernels.blocks.checks import stages
from quasar_kernels.blocks.checks.branches import Block, Branch
from quasar_kernels.blocks.checks.findings import Finding, Verdict
from quasar_kernels.blocks.checks.training import HELD_OUT, History, draw, train
from tests.quasar_kernels.blocks.checks.models import VOCABULARY, NaNLater

CPU = torch.device("cpu")
PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL


class Known(nn.Module):
    """Returns logits of -2 and 2; at `place` they rise by 2 * `effect` if token `later` is odd."""

    def __init__(self, effect: float, place: int = 0, later: int = 31) -> None:
        super().__init__()
        self.effect, self.place, self.later = 2 * effect, place, later

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.full((*tokens.shape, VOCABULARY), 2.0)
        logits[..., ::2] = -2
        logits[:, self.place] += self.effect * (tokens[:, self.later] % 2)[:, None]
        return logits


def causal(model: nn.Module) -> Finding:
    shape, finite, leak = stages.forward(model, VOCABULARY, CPU)
    assert (shape.verdict, finite.verdict) == (PASS, PASS)
    return leak


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(
    ("effect", "on_gpu", "verdict"),
    [(9e-5, False, PASS), (1.2e-4, False, FAIL), (1.9e-2, True, PASS), (2.1e-2, True, FAIL)],
)
def test_causality(monkeypatch, effect, on_gpu, verdict):
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu)  # bf16 there, with a higher limit
    found = causal(Known(effect))
    assert found.verdict is verdict
    assert on_gpu or found.figures["leak"] == pytest.approx(effect, rel=0.01)


@pytest.mark.parametrize(("place", "later"), [(0, 1), (15, 16), (30, 31), (0, 31)])
def test_a_leak_is_found_at_the_ends_and_in_the_middle(place: int, later: int) -> None:
    assert causal(Known(0.5, place, later)).figures["leak"] == pytest.approx(0.5, rel=0.05)


def test_a_wrong_shape_ends_the_stage_and_values_that_are_not_finite_are_counted():
    class Misshapen(Known):
        def forward(self, tokens: Tensor) -> Tensor:
            logits = super().forward(tokens)[:, :31]
            logits[2, 3, :3] = torch.tensor([math.nan, math.inf, -math.inf])
            return logits

    shape, finite = stages.forward(Misshapen(0.0), VOCABULARY, CPU)
    assert (shape.verdict, finite.verdict, finite.figures) == (FAIL, FAIL, {"not_finite": 3})
    assert shape.told == "[8, 31, 32], required [8, 32, 32]"


def test_no_step_trains_on_the_held_out_batch() -> None:
    held_out = draw(VOCABULARY, HELD_OUT, CPU)
    assert all(not torch.equal(draw(VOCABULARY, step, CPU), held_out) for step in range(3))


def test_a_training_ends_at_the_first_loss_that_is_not_finite() -> None:
    history = train(NaNLater(), VOCABULARY, 50, CPU)
    assert 1 < len(history.losses) == len(history.gradient_norms) < 50
    assert [math.isfinite(loss) for loss in history.losses].index(False) == len(history.losses) - 1


def learned(monkeypatch: pytest.MonkeyPatch, history: History) -> list[Finding]:
    monkeypatch.setattr(stages, "train", lambda *_: history)
    return list(stages.learning(nn.Linear(1, 1), VOCABULARY, 1, CPU))


@pytest.mark.parametrize(
    ("last", "verdict"), [(6.0, PASS), (6.1, WARN), (7.1, WARN), (7.25, FAIL), (math.nan, FAIL)]
)
def test_fall_of_the_loss(monkeypatch, last, verdict):
    loss, *_ = learned(monkeypatch, History([8.0, 70.0, *[last] * 10], [1.0]))
    assert loss.verdict is verdict
    assert loss.figures["fall"] == pytest.approx(1 - last / 8, nan_ok=True)


@pytest.mark.parametrize(
    ("norms", "verdict"),
    [
        ([0.1, 5.0, 10.0], PASS),
        ([1.0, 0.09, 1.0], WARN),
        ([1.0, 10.1], WARN),
        ([1e-3, 1e3], WARN),
        ([9e-4, 1.0], FAIL),
        ([1.0, 1001.0], FAIL),
        ([1.0, math.nan, 1.0], FAIL),
    ],
)
def test_gradient_norms(monkeypatch, norms, verdict):
    _, found, _ = learned(monkeypatch, History([1.0], norms))
    assert found.verdict is verdict


def blocks(*branches: tuple[float, float, float]) -> list[Block]:
    named = (Branch(f"m{n}", *figures) for n, figures in enumerate(branches))
    return [Block("blocks.0", tuple(named))]


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(3.0, PASS), (3.1, WARN), (10.0, WARN), (10.1, FAIL)]
)
def test_balance_of_branches(monkeypatch, ratio, verdict):
    found = blocks((ratio, 1.0, 0.0), (1.0, 2.0, 0.0))
    monkeypatch.setattr(stages, "analyse", lambda *_: (0.0, found))
    added, gradients = stages.balance(nn.Linear(1, 1), VOCABULARY, CPU)
    assert (added.verdict, gradients.verdict) == (verdict, PASS)
    assert added.figures == {"m0": ratio, "m1": 1.0, "ratio": ratio}
    assert gradients.figures == {"m0": 1.0, "m1": 2.0, "ratio": 2.0}


@pytest.mark.parametrize(("rise", "verdict"), [(2e-3, PASS), (9e-4, WARN), (0.0, FAIL)])
def test_rise_of_the_loss_without_a_branch(monkeypatch, rise, verdict):
    found = blocks((1.0, 1.0, 0.125 + rise), (1.0, 1.0, 0.25))
    monkeypatch.setattr(stages, "analyse", lambda *_: (0.125, found))
    first, second = stages.ablations(nn.Linear(1, 1), VOCABULARY, CPU)
    assert first.verdict is verdict
    assert (second.verdict, second.figures) == (PASS, {"loss": 0.125, "rise": 0.125})
