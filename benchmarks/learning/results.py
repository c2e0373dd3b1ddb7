"""What trainings of models of blocks found, as schema-checked models."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from benchmarks.recall.results import Curve, Recipe, Task
from benchmarks.results import Frozen, NotNegative, Positive, Run


class Trained(Frozen):
    """A model of blocks."""

    mixers: tuple[str, ...] = Field(description="the branches of its blocks")
    seed: int = Field(description="of its first weights")
    inner: int | None = Field(description="width of the MLP's inner channels")
    parameters: int


class TaughtToRecall(Trained):
    """One training to recall."""

    curve: Curve


class LearnedRecall(Run):
    """Models of single mechanisms and of hybrids, at equal parameters, trained to recall."""

    protocol: str
    task: Task
    recipe: Recipe
    seeds: int = Field(3, description="trainings of each model that were asked for")
    trainings: tuple[TaughtToRecall, ...]


class TextRecipe(NamedTuple):
    """A model of bytes, and how it is trained."""

    steps: int = 400
    width: int = 256
    heads: int = 4
    layers: int = 4
    tokens: int = 512  # of a sequence
    batch: int = 32  # sequences
    rate: float = 2e-3


class TaughtText(Trained):
    """One training on a text."""

    losses: tuple[NotNegative, ...] = Field(description="means of `EVERY` steps, nats a byte")
    held_out: Positive = Field(description="nats a byte of the text that was not trained on")


class LearnedText(Run):
    """Models of single mechanisms and of hybrids, at equal parameters, trained on a text."""

    protocol: str
    text: str = Field(description="which text, its bytes and its SHA-256")
    recipe: TextRecipe
    seeds: int = Field(3, description="trainings of each model that were asked for")
    trainings: tuple[TaughtText, ...]


EVERY = 10
"""Steps whose losses a curve's point averages."""
