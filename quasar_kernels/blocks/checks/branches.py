"""The contribution of each branch of a hybrid block to the output and to the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quasar_kernels.blocks import HybridBlock
from quasar_kernels.blocks.checks.training import HELD_OUT, draw, loss_of


class Branch(NamedTuple):
    """One branch of one block, on the held-out batch."""

    name: str
    activation: float  # RMS of its contribution
    gradient: float  # norm of its parameters' gradients
    without: float  # the loss if the branch's contribution is zero


class Block(NamedTuple):
    """A block's branches."""

    name: str
    branches: tuple[Branch, ...]

    def ratio(self, figure: str) -> float:
        """Return a field's largest value over the branches, divided by its smallest."""
        values = [getattr(branch, figure) for branch in self.branches]
        return max(values) / min(values) if min(values) != 0 else float("inf")


def analyse(model: nn.Module, vocabulary: int, device: torch.device) -> tuple[float, list[Block]]:
    """Return the model's loss on the held-out batch, and its blocks with several branches."""
    tokens = draw(vocabulary, HELD_OUT, device)
    blocks = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, HybridBlock) and len(module.mixers) > 1
    }
    added: dict[str, list[float]] = {}
    hooks = [
        block.fusion.register_forward_hook(_record_rms(added, name))
        for name, block in blocks.items()
    ]
    model.zero_grad()
    loss = loss_of(model, tokens)
    loss.backward()
    for hook in hooks:
        hook.remove()
    result = []
    for name, block in blocks.items():
        branches = []
        for n, (kind, mixer) in enumerate(block.mixers.items()):
            gradients = [p.grad for p in mixer.parameters() if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
            without = _loss_without(model, block, n, tokens)
            branches.append(Branch(kind, added[name][n], float(norm), without))
        result.append(Block(name, tuple(branches)))
    model.zero_grad()
    return loss.item(), result


def _record_rms(added: dict[str, list[float]], name: str) -> Any:
    def hook(_: nn.Module, __: object, outputs: list[Tensor]) -> None:
        added[name] = [float(y.detach().float().square().mean().sqrt()) for y in outputs]

    return hook


@torch.no_grad()
def _loss_without(model: nn.Module, block: HybridBlock, branch: int, tokens: Tensor) -> float:
    def hook(_: nn.Module, __: object, outputs: list[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(y) if n == branch else y for n, y in enumerate(outputs)]

    handle = block.fusion.register_forward_hook(hook)
    try:
        return float(loss_of(model, tokens))
    finally:
        handle.remove()
