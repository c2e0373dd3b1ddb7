"""Sizes of a model, recipe and files of a training, with defaults; does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from quasar_kernels.blocks import MIXERS

BYTES = 256
CHECKPOINT, CURVE = "model.pt", "loss.svg"
"""The files of a training's folder."""


class Sizes(NamedTuple):
    """A model's sizes; the names are those of `HybridBlock`'s arguments."""

    vocabulary: int = BYTES
    width: int = 128
    heads: int = 4
    layers: int = 4
    mixers: tuple[str, ...] = MIXERS
    fusion: str = "gains"
    state: int = 64
    checkpoint_above: int | None = None
    inner: int | None = None


class Recipe(NamedTuple):
    """The settings of a training; they determine each step's batch and learning rate."""

    tokens: int = 256  # of a sequence
    batch: int = 8  # sequences
    rate: float = 2e-3
    warmup: int = 50  # steps over which the rate rises
    weight_decay: float = 0.01
    clip: float = 1.0  # the gradient's largest norm
    seed: int = 0
