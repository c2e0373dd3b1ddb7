"""The figures of each branch, against models whose gains are set to zero."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quasar_kernels.blocks.checks import stages
from quasar_kernels.blocks.checks.branches import analyse
from quasar_kernels.blocks.checks.training import HELD_OUT, draw
from quasar_kernels.blocks.language import LanguageModel, Sizes

CPU = torch.device("cpu")
VOCABULARY = 32


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(2)
    return LanguageModel(Sizes(VOCABULARY, 16, 2, 2, ("rwkv6", "mamba2", "quasar"), state=16))


def loss(model: LanguageModel) -> torch.Tensor:
    """Return the cross entropy of all tokens but the first two, computed independently."""
    tokens = draw(VOCABULARY, HELD_OUT, CPU)
    chances = model(tokens).double().log_softmax(-1)
    rows = [chances[b, t - 1, tokens[b, t]] for b in range(8) for t in range(2, 32)]
    return -torch.stack(rows).mean()


def test_the_loss_without_each_branch(model: LanguageModel) -> None:
    whole, blocks = analyse(model, VOCABULARY, CPU)
    assert whole == pytest.approx(loss(model).item(), rel=1e-5)
    assert [block.name for block in blocks] == ["blocks.0", "blocks.1"]
    seen = set()
    for number, block in enumerate(blocks):
        assert [branch.name for branch in block.branches] == ["rwkv6", "mamba2", "quasar"]
        for place, branch in enumerate(block.branches):
            without = copy.deepcopy(model)
            without.get_parameter(f"blocks.{number}.fusion.gains").data[place] = 0
            assert branch.without == pytest.approx(loss(without).item(), rel=1e-5)
            seen.add(branch.without)
    assert len(seen) == 6
    assert not any(module._forward_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_gradient_and_activation_of_a_branch(model: LanguageModel) -> None:
    model.zero_grad()
    loss(model).backward()
    second: Any = model.blocks[1]
    wanted = [
        float(torch.cat([p.grad.flatten() for p in mixer.parameters()]).norm())
        for mixer in second.mixers.values()
    ]
    x = model.embedding(draw(VOCABULARY, HELD_OUT, CPU))
    first: Any = model.blocks[0]
    normed = F.rms_norm(x, x.shape[-1:], first.norm.weight)
    added = first.fusion.gains[1] * first.mixers["mamba2"](normed)[0]
    _, (block, other) = analyse(model, VOCABULARY, CPU)
    assert [branch.gradient for branch in other.branches] == pytest.approx(wanted, rel=1e-4)
    rms = float(added.detach().double().square().mean() ** 0.5)
    assert block.branches[1].activation == pytest.approx(rms, rel=1e-4)


def test_a_block_of_one_branch_is_not_checked_for_balance() -> None:
    model = LanguageModel(Sizes(VOCABULARY, 16, 2, 1, ("mamba2",), state=16))
    assert list(stages.balance(model, VOCABULARY, CPU)) == []
