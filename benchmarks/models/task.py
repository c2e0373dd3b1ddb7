"""Multi-query associative recall (MQAR): pairs of a key and a value, then the keys again.

The task of Arora et al., "Zoology" (arXiv 2312.04927): a sequence begins with pairs, and each key
appears again at a distance drawn from a power law. There the model must predict its value. The
other tokens are noise from another part of the vocabulary, so every query has one correct answer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

POWER = 0.01
"""Zoology's parameter: the exponent of the distances' power law plus 1. Each octave of distances
has nearly as many queries."""


class Task(NamedTuple):
    vocabulary: int
    tokens: int  # of a sequence
    pairs: int  # of a sequence, each queried once
    batch: int  # sequences


class Batch(NamedTuple):
    tokens: Tensor  # [B, T] int64
    places: Tensor  # [B, pairs] int64: the indices of the queries in their sequence
    answers: Tensor  # [B, pairs] int64: the token that the model must predict for each query

    def part(self, rank: int, world: int) -> Batch:
        """Return the sequences of one of `world` processes; all together are the batch."""
        return Batch(*(x.chunk(world)[rank] for x in self))


def draw(task: Task, seed: int, device: torch.device) -> Batch:
    """Draw a batch of a task; equal seeds and devices give equal batches.

    Raises:
        ValueError: the sequence or the vocabulary is too short for the pairs.
    """
    kinds = task.vocabulary // 3  # keys, values, and noise
    context = 2 * task.pairs
    slots = (task.tokens - context) // 2
    if slots < task.pairs or kinds < task.pairs:
        raise ValueError(
            f"{task.pairs} pairs need {2 * context} tokens and a vocabulary of {3 * task.pairs}; "
            f"got {task.tokens} and {task.vocabulary}"
        )
    random = torch.Generator(device).manual_seed(seed)
    keys, values = (
        torch.rand(task.batch, kinds, generator=random, device=device).topk(task.pairs).indices
        for _ in range(2)
    )
    values = values + kinds
    tokens = torch.randint(
        2 * kinds, task.vocabulary, (task.batch, task.tokens), generator=random, device=device
    )
    tokens[:, :context] = torch.stack([keys, values], dim=-1).flatten(1)
    distance = torch.arange(1, slots + 1, device=device, dtype=torch.float32)
    chances = (distance ** (POWER - 1)).expand(task.batch, -1)
    places = context + 2 * torch.multinomial(chances, task.pairs, generator=random)
    return Batch(tokens.scatter(1, places, keys), places, values)
