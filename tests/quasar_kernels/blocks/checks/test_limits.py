"""The limits of the model checks: figures on both sides of each, made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from quasar_kernels.blocks.checks import stages
from quasar_kernels.blocks.checks.branches import Block, Branch
from quasar_kernels.blocks.checks.findings import Finding, Verdict
from quasar_kernels.blocks.checks.training import Course

CPU = torch.device("cpu")
PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL
VOCABULARY = 32


class Known(nn.Module):
    """Says -2 and 2 in turns, and `effect` of that more at a place where a later token is odd."""

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
    assert (shape.verdict, finite.verdict, finite.figures["not_finite"]) == (PASS, PASS, 0)
    return leak


@pytest.mark.parametrize(("effect", "verdict"), [(0.0, PASS), (9e-5, PASS), (1.2e-4, FAIL)])
def test_a_leak_is_a_share_of_what_the_logits_are(effect: float, verdict: Verdict) -> None:
    found = causal(Known(effect))
    assert found.verdict is verdict
    assert found.figures["leak"] == pytest.approx(effect, rel=0.01, abs=1e-9)


@pytest.mark.parametrize(("place", "later"), [(0, 1), (15, 16), (30, 31), (0, 31), (15, 31)])
def test_a_leak_is_found_at_the_ends_and_in_the_middle(place: int, later: int) -> None:
    assert causal(Known(0.5, place, later)).figures["leak"] == pytest.approx(0.5, rel=0.05)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(("effect", "verdict"), [(1.9e-2, PASS), (2.1e-2, FAIL)])
def test_bf16_on_a_gpu_may_leak_more(monkeypatch, effect, verdict):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert causal(Known(effect)).verdict is verdict


@pytest.mark.parametrize(
    ("size", "told"), [(31, "[8, 31, 32], required is [8, 32, 32]"), (40, "[8, 40, 32]")]
)
def test_a_wrong_shape_ends_the_check_and_what_is_not_finite_is_counted(size, told):
    class Misshapen(Known):
        def forward(self, tokens: Tensor) -> Tensor:
            logits = super().forward(tokens).repeat(1, 2, 1)[:, :size]
            logits[2, 3, :3] = torch.tensor([math.nan, math.inf, -math.inf])
            return logits

    shape, finite = stages.forward(Misshapen(0.0), VOCABULARY, CPU)
    assert (shape.verdict, finite.verdict, finite.figures) == (FAIL, FAIL, {"not_finite": 3})
    assert told in shape.told


@pytest.mark.parametrize(("even", "verdict"), [(32, PASS), (27, PASS), (26, FAIL), (1, FAIL)])
def test_the_entropy_at_the_start_is_within_a_twentieth_of_all(even: int, verdict: Verdict) -> None:
    class Even(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            logits = torch.full((*tokens.shape, VOCABULARY), -1e4)
            logits[..., :even] = 3.0
            return logits

    found = stages.beginning(Even(), VOCABULARY, CPU)
    assert found.verdict is verdict
    assert found.figures["entropy"] == pytest.approx(math.log(even), abs=1e-5)
    assert found.figures["share"] == pytest.approx(math.log(even) / math.log(32), abs=1e-5)
    assert f"{math.log(even):.3f} nats" in found.told
    assert found.told.endswith("of log(32), limit 95%")


def learned(monkeypatch: pytest.MonkeyPatch, course: Course) -> list[Finding]:
    monkeypatch.setattr(stages, "train", lambda *_: course)
    return list(stages.learning(nn.Linear(1, 1), VOCABULARY, 1, CPU))


@pytest.mark.parametrize(
    ("last", "verdict"), [(6.0, PASS), (6.1, WARN), (7.1, WARN), (7.25, FAIL), (math.nan, FAIL)]
)
def test_a_quarter_of_the_loss_has_to_go(monkeypatch, last, verdict):
    loss, *_ = learned(monkeypatch, Course([8.0, 70.0, *[last] * 10], [1.0]))
    assert loss.verdict is verdict
    assert loss.figures["first"] == 8.0
    assert loss.figures["fall"] == pytest.approx(1 - last / 8, nan_ok=True)
    assert loss.figures["last"] == pytest.approx(last, nan_ok=True)
    assert "8.00 to" in loss.told
    assert "12 steps" in loss.told


@pytest.mark.parametrize(
    ("norms", "verdict"),
    [
        ([0.1, 5.0, 10.0], PASS),
        ([5.0], PASS),
        ([50.0], WARN),
        ([1.0, 0.09, 1.0], WARN),
        ([1.0, 10.1], WARN),
        ([1e-3, 1e3], WARN),
        ([9e-4, 1.0], FAIL),
        ([1.0, 1001.0], FAIL),
        ([1.0, math.nan, 1.0], FAIL),
    ],
)
def test_every_gradient_has_a_norm_between_limits(monkeypatch, norms, verdict):
    _, found, _ = learned(monkeypatch, Course([1.0], norms))
    assert found.verdict is verdict
    if not math.isnan(sum(norms)):
        assert (found.figures["low"], found.figures["high"]) == (min(norms), max(norms))
    assert found.told.endswith("limits 0.1 and 10")


def test_dead_parameters_are_counted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, found = learned(monkeypatch, Course([1.0], [1.0], ["a.weight", "b"]))
    assert (found.verdict, found.figures) == (FAIL, {"dead": 2})
    assert found.told.endswith("a.weight, b")
    *_, none = learned(monkeypatch, Course([1.0], [1.0]))
    assert (none.verdict, none.told, none.figures) == (PASS, "none", {"dead": 0})


def blocks(*of: tuple[float, float, float]) -> list[Block]:
    return [Block("blocks.0", tuple(Branch(f"m{n}", *figures) for n, figures in enumerate(of)))]


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.0, PASS), (3.0, PASS), (3.1, WARN), (10.0, WARN), (10.1, FAIL)]
)
def test_branches_differ_by_three_at_most_and_one_that_is_ten_times_another_fails(
    monkeypatch: pytest.MonkeyPatch, ratio: float, verdict: Verdict
) -> None:
    found = blocks((ratio, 1.0, 0.0), (1.0, 2.0, 0.0))
    monkeypatch.setattr(stages, "looked_at", lambda *_: (0.0, found))
    added, gradients = stages.balance(nn.Linear(1, 1), VOCABULARY, CPU)
    assert (added.verdict, gradients.verdict) == (verdict, PASS)
    assert added.figures == {"m0": ratio, "m1": 1.0, "ratio": ratio}
    assert gradients.figures == {"m0": 1.0, "m1": 2.0, "ratio": 2.0}
    assert added.told.endswith(f"ratio {ratio:.2f}, limit 3")


@pytest.mark.parametrize(
    ("without", "verdict"), [(1e-3, PASS), (9e-4, WARN), (0.0, FAIL), (-0.5, FAIL)]
)
def test_the_loss_rises_without_a_branch(monkeypatch, without, verdict):
    found = blocks((1.0, 1.0, without), (1.0, 1.0, 0.25))
    monkeypatch.setattr(stages, "looked_at", lambda *_: (0.0, found))
    first, second = stages.ablations(nn.Linear(1, 1), VOCABULARY, CPU)
    assert (first.verdict, first.figures) == (verdict, {"loss": 0.0, "rise": without})
    assert second.verdict is PASS
    monkeypatch.setattr(stages, "looked_at", lambda *_: (0.125, found))
    assert list(stages.ablations(nn.Linear(1, 1), VOCABULARY, CPU))[1].figures["rise"] == 0.125
