"""A small language model of QuasarAttention layers, and batches of random tokens for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quasar_kernels.mount import mount

mount()

from fla.layers.quasar import QuasarAttention as QuasarAttention  # noqa: E402


class Block(nn.Module):
    """Mixes tokens, then channels, each on a normed residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mixer = QuasarAttention(width, head_dim=width // heads, num_heads=heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output `[B, T, width]` for x `[B, T, width]`."""
        x = x + self.mixer(self.mixer_norm(x))[0]
        return torch.add(x, self.mlp(self.mlp_norm(x)))


class Model(nn.Module):
    """Predicts tokens at some places of a sequence; input and output share an embedding.

    If `checkpointed` is set, the backward pass computes each block again.
    """

    def __init__(self, vocabulary: int, width: int, heads: int) -> None:
        super().__init__()
        self.checkpointed = False
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return logits `[B, P, vocabulary]` at the places `[B, P]` of the tokens `[B, T]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        return F.linear(self.norm(x), self.embedding.weight)


class Task(NamedTuple):
    """The shape of a batch."""

    vocabulary: int
    tokens: int  # of a sequence
    places: int  # of a sequence, at which a token is predicted
    batch: int  # sequences


class Batch(NamedTuple):
    """Random tokens `[B, T]`, the places `[B, P]` of predictions, and the answers `[B, P]`."""

    tokens: Tensor
    places: Tensor
    answers: Tensor

    @classmethod
    def draw(cls, task: Task, seed: int, device: torch.device) -> Batch:
        """Draw a batch; equal seeds and devices give equal batches."""
        random = torch.Generator(device).manual_seed(seed)

        def integers(stop: int, *shape: int) -> Tensor:
            return torch.randint(stop, (task.batch, *shape), generator=random, device=device)

        tokens = integers(task.vocabulary, task.tokens)
        places = integers(task.tokens, task.places)
        return cls(tokens, places, integers(task.vocabulary, task.places))

    def part(self, rank: int, world: int) -> Batch:
        """Return the sequences of one of `world` processes; all together are the batch."""
        return Batch(*(x.chunk(world)[rank] for x in self))

    def loss(self, logits: Tensor) -> Tensor:
        """Return the mean cross entropy of logits `[B, P, vocabulary]`, in nats."""
        return F.cross_entropy(logits.flatten(0, 1).float(), self.answers.flatten())
