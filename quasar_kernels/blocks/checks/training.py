"""The mini-training of the model checks: each token depends on the token two places before."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, BATCH = 32, 8
RATE, WARMUP = 5e-3, 10
NOISE = 0.1
"""Share of tokens that are random instead of following from an earlier token."""
HELD_OUT = 1 << 31
"""The seed of the held-out batch. A CPU's generator uses only 32 bits of a seed."""


def draw(vocabulary: int, seed: int, device: torch.device) -> Tensor:
    """Return a batch `[BATCH, TOKENS]`, which only a model that mixes tokens can learn."""
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (BATCH, TOKENS), generator=random)
    noisy = torch.rand(BATCH, TOKENS, generator=random) < NOISE
    for t in range(2, TOKENS):
        tokens[:, t] = torch.where(noisy[:, t], tokens[:, t], order[tokens[:, t - 2]])
    return tokens.to(device)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats, of all tokens but each sequence's first two."""
    with torch.autocast("cuda", torch.bfloat16, tokens.is_cuda):
        logits = model(tokens)
    return F.cross_entropy(logits[:, 1:-1].flatten(0, 1).float(), tokens[:, 2:].flatten())


@dataclass
class History:
    """The figures of a mini-training."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)  # parameters with a gradient that was always zero

    @property
    def fall(self) -> float:
        """The relative fall from the first loss to the mean of the last ten."""
        last = self.losses[-10:]
        return 1 - sum(last) / len(last) / self.losses[0] if last else math.nan


def train(model: nn.Module, vocabulary: int, steps: int, device: torch.device) -> History:
    """Train the model in place, until the first loss or gradient that is not finite."""
    history, parameters = History(), dict(model.named_parameters())
    learned: set[str] = set()
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP)
        loss = loss_of(model, draw(vocabulary, step, device))
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        norms = {n: float(torch.linalg.vector_norm(g)) for n, g in gradients.items()}
        learned |= {name for name, norm in norms.items() if norm != 0}
        history.losses.append(loss.item())
        history.gradient_norms.append(math.hypot(*norms.values()))
        if not math.isfinite(history.losses[-1] + history.gradient_norms[-1]):
            break
        optimizer.step()
    history.dead = [name for name in parameters if name not in learned]
    return history
