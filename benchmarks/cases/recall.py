"""A model of QuasarAttention layers learns to recall, in every way that docs/layer.md names.

    python -m benchmarks recall --out benchmarks/h200/recall.json

Trainings on several GPUs take two; with one GPU they are omitted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from itertools import chain, starmap
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Run, start
from benchmarks.models.model import Model, recall_loss, recalled
from benchmarks.models.processes import in_group
from benchmarks.models.task import Task, draw
from benchmarks.models.ways import Prepared, prepare

RECALL = 0.99
"""A trained model must answer more than this share of held-out queries correctly."""

WAYS = {
    "fp32": "fp32, the definition in torch",
    "bf16": "bf16 autocast",
    "compiled": "`torch.compile`",
    "checkpointed": "activation checkpointing",
    "ddp": "DistributedDataParallel",
    "fsdp": "FSDP2, bf16 parameters",
}
"""Names of the ways to train; all but the first use this project's kernels on a GPU."""
ON_SEVERAL_GPUS = ("ddp", "fsdp")

ENOUGH = 0.995
"""Share of correct answers in a few held-out batches at which a training ends."""


class Recipe(NamedTuple):
    """A model, and how it is trained."""

    most_steps: int
    width: int = 512
    heads: int = 8
    layers: int = 2
    rate: float = 2e-3
    every: int = 10  # steps between two evaluations


GPUS = 2
"""GPUs used by each training on several GPUs."""
HELD_OUT = 1 << 31
"""The first seed of held-out batches; a CPU's generator uses 32 bits of a seed."""
BATCHES, LAST_BATCHES = 4, 16
"""Held-out batches of an evaluation, and of the last evaluation."""
WARMUP = 50
"""Steps over which the learning rate rises."""
SETTINGS = (
    (Task(vocabulary=384, tokens=512, pairs=32, batch=32), Recipe(most_steps=2000), tuple(WAYS)),
    (
        Task(vocabulary=96, tokens=2048, pairs=32, batch=16),
        Recipe(most_steps=1200),
        ("fp32", "bf16", "compiled"),
    ),
)
"""Each task with the recipe and the ways of its trainings."""

PROTOCOL = """\
Multi-query associative recall after Zoology (arXiv 2312.04927): pairs of a key and a value, each \
key again at a distance drawn from a power law of exponent -0.99, and noise; every step draws \
a new batch. Two blocks of a QuasarAttention layer and an MLP, each after RMSNorm; AdamW (weight \
decay 0.01), the rate rising over 50 steps and constant then. All begin with the same weights and \
see the same batches, on several GPUs cut into equal parts. fp32 is the layer's definition by \
torch, without tf32. A training ends when 99.5% of the answers in 4 held-out batches are correct; \
rounding alone shifts the step at which a model begins to recall by hundreds. Recall is the share \
of correct answers in 16 held-out batches. A step's time is the median over the intervals between \
two evaluations."""


def train(device: torch.device, way: str, task: Task, recipe: Recipe) -> Entry:
    """Train one model in one way, in this process or, with its group, on several devices."""
    torch.manual_seed(0)
    model = Model(task.vocabulary, recipe.width, recipe.heads, recipe.layers).to(device)
    return train_prepared(prepare(model, way, device), device, way, task, recipe)


def train_prepared(
    prepared: Prepared,
    device: torch.device,
    way: str,
    task: Task,
    recipe: Recipe,
) -> Entry:
    """Train a prepared model in place, in this process or with its group."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    started = time.perf_counter()
    optimizer = torch.optim.AdamW(prepared.parameters, lr=recipe.rate, fused=True)
    losses, times = [], []
    for first in range(0, recipe.most_steps, recipe.every):
        since = _now(device)
        total = torch.zeros((), device=device)
        for step in range(first, first + recipe.every):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * min(1, (step + 1) / WARMUP)
            batch = draw(task, step, device).part(rank, world)
            loss = recall_loss(prepared.call(batch.tokens, batch.places), batch.answers)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / (recipe.every * world))
        times.append(_now(device) - since)
        if recall(prepared, task, device, BATCHES) >= ENOUGH:
            break
    accuracy = recall(prepared, task, device, LAST_BATCHES)
    figures = {
        "gpus": world,
        "recall": accuracy,
        "steps": recipe.every * len(losses),
        "step_ms": 1e3 * median(times) / recipe.every,
        "seconds": time.perf_counter() - started,
    }
    of = {**task._asdict(), "most_steps": recipe.most_steps}
    rounded = tuple(float(f"{loss:.5g}") for loss in losses)
    return Entry(table="trainings", of=of, by=way, figures=figures, series={"losses": rounded})


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def recall(prepared: Prepared, task: Task, device: torch.device, batches: int) -> float:
    """Return the share of correct answers in held-out batches."""
    shares = []
    for n in range(batches):
        batch = draw(task, HELD_OUT + n, device)
        shares.append(recalled(prepared.call(batch.tokens, batch.places), batch.answers))
    share = torch.stack(shares).mean()
    if dist.is_initialized():  # so that all processes continue or end
        dist.all_reduce(share)
        share /= dist.get_world_size()
    return share.item()


def trainings(task: Task, recipe: Recipe, ways: Iterable[str]) -> Iterator[Entry]:
    """Train in each way that the machine's GPUs allow."""
    several = torch.cuda.device_count() >= GPUS
    for way in ways:
        if way not in ON_SEVERAL_GPUS:
            yield train(torch.device("cuda"), way, task, recipe)
        elif several:
            yield in_group(GPUS, "cuda", train, way, task, recipe)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    model = SETTINGS[0][1]
    settings = {
        name: getattr(model, name) for name in ("width", "heads", "layers", "rate", "every")
    }
    run = start("recall", PROTOCOL, args.commit, settings=settings)
    yield from run.growing(chain.from_iterable(starmap(trainings, SETTINGS)))


def limits(run: Run) -> Iterator[Criterion]:
    for entry in run.table("trainings"):
        what = f"recall over {entry.of['tokens']:,} tokens, {entry.by}"
        yield Criterion(what, entry.figures["recall"], RECALL, at_least=True)
