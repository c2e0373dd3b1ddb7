"""A language model of QuasarAttention layers, no larger than recall needs."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_layer

mount()

from fla.layers.quasar import QuasarAttention  # noqa: E402


class Block(nn.Module):
    """Mixes tokens, then channels, each on a normed residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.by_definition = False
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mixer = QuasarAttention(width, head_dim=width // heads, num_heads=heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output `[B, T, width]` for x `[B, T, width]`."""
        x = x + self._mixed(self.mixer_norm(x))
        return torch.add(x, self.mlp(self.mlp_norm(x)))

    def _mixed(self, x: Tensor) -> Tensor:
        mixer = self.mixer
        if self.by_definition:
            sizes = {"num_heads": mixer.num_heads, "head_dim": mixer.head_dim}
            return quasar_layer(dict(mixer.named_parameters()), x, dtype=x.dtype, **sizes)
        return mixer(x)[0]  # type: ignore[no-any-return]


class Model(nn.Module):
    """Predicts the token after some places of a sequence; input and output share an embedding.

    Args:
        layers: number of blocks, each a QuasarAttention layer and an MLP.

    Attributes:
        checkpointed: whether the backward pass computes each block again; initially False.
    """

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int = 2) -> None:
        super().__init__()
        self.checkpointed = False
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def compute_by_definition(self) -> None:
        """Compute the layers by the reference's torch operations, without kernels."""
        for block in self.blocks:
            cast(Block, block).by_definition = True

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return logits `[B, P, vocabulary]` after the places `[B, P]` of the tokens `[B, T]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        return F.linear(self.norm(x), self.embedding.weight)


def recall_loss(logits: Tensor, answers: Tensor) -> Tensor:
    """Return the mean cross entropy of logits `[B, P, V]` for the answers `[B, P]`, in nats."""
    return F.cross_entropy(logits.flatten(0, 1).float(), answers.flatten())


def recalled(logits: Tensor, answers: Tensor) -> Tensor:
    """Return the share of queries with the answer as their likeliest token."""
    return (logits.argmax(-1) == answers).float().mean()
