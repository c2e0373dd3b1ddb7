"""What benchmarks.recall.train found, as models, and the limit of recall."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import Field

from benchmarks.engine.limits import Criterion
from benchmarks.results import Frozen, NotNegative, Positive, Run

RECALL = 0.99
"""A trained model must answer more than this share of held-out queries rightly."""

WAYS = {
    "fp32": "fp32, the definition in torch",
    "bf16": "bf16 autocast",
    "compiled": "`torch.compile`",
    "checkpointed": "activation checkpointing",
    "ddp": "DistributedDataParallel",
    "fsdp": "FSDP2, bf16 parameters",
}
"""What each way is called; all but the first run this project's kernels on a GPU."""
ON_SEVERAL_GPUS = ("ddp", "fsdp")


ENOUGH = 0.995
"""A training ends when so much of a few held-out batches is answered rightly."""


class Task(NamedTuple):
    """Sizes of the task."""

    vocabulary: int
    tokens: int  # of a sequence
    pairs: int  # of a sequence, each asked for once
    batch: int  # sequences


class Recipe(NamedTuple):
    """A model, and how it is trained."""

    most_steps: int
    width: int = 512
    heads: int = 8
    layers: int = 2
    rate: float = 2e-3
    every: int = 10  # steps between two evaluations


class Curve(Frozen):
    """One training."""

    way: str = Field(description="a key of `WAYS`")
    gpus: int
    losses: tuple[NotNegative, ...] = Field(description="means of `every` steps, in nats")
    recall: NotNegative = Field(description="share of held-out queries answered rightly")
    steps: int = Field(description="after which recall was ENOUGH, or the most")
    step_ms: Positive = Field(description="median time of a step, the data's drawing included")
    seconds: Positive = Field(description="the whole training, compilation included")


class Setting(Frozen):
    """A task, a model, and how its trainings went."""

    task: Task
    recipe: Recipe
    curves: tuple[Curve, ...]


class Recall(Run):
    """Models trained to recall, on one machine."""

    protocol: str
    settings: tuple[Setting, ...]


def criteria(run: Recall) -> Iterator[Criterion]:
    """Return the limit of every training with its figure."""
    for setting in run.settings:
        for curve in setting.curves:
            what = f"recall over {setting.task.tokens:,} tokens, {curve.way}"
            yield Criterion(what, curve.recall, RECALL, at_least=True, digits=".4f")
