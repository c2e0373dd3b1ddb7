"""Train a model to recall in every way, and write what it learned and how fast.

    python -m benchmarks.recall.train --out benchmarks/h200/recall.json

Trainings on several GPUs take two; with one GPU they are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engine.commands import options, say
from benchmarks.recall.model import Model, recall_loss, recalled
from benchmarks.recall.processes import in_group
from benchmarks.recall.results import (
    ENOUGH,
    ON_SEVERAL_GPUS,
    WAYS,
    Curve,
    Recall,
    Recipe,
    Setting,
    Task,
)
from benchmarks.recall.task import draw
from benchmarks.recall.ways import Prepared, prepare
from benchmarks.results import origin, write
from quasar_kernels.blocks.language.recorded import RecordedStep

GPUS = 2
"""GPUs of the trainings on several."""
HELD_OUT = 1 << 31
"""The first seed of batches that are not trained on; a CPU's generator takes 32 bits of a seed."""
BATCHES, LAST_BATCHES = 4, 16
"""How many of them an evaluation takes, and how many the last."""
WARMUP = 50
"""Steps over which the rate rises."""
SETTINGS = (
    (Task(vocabulary=384, tokens=512, pairs=32, batch=32), Recipe(most_steps=2000), tuple(WAYS)),
    (
        Task(vocabulary=96, tokens=2048, pairs=32, batch=16),
        Recipe(most_steps=1200),
        ("fp32", "bf16", "compiled"),
    ),
)
"""Each task with how its models are trained, and in which ways."""

PROTOCOL = """\
Multi-query associative recall after Zoology (arXiv 2312.04927): pairs of a key and a value stand \
at a sequence's start, each key comes once more at a distance drawn by a power law of exponent \
-0.99, and noise fills the rest; keys, values and noise have a third of the vocabulary each, and \
every batch is drawn anew. Two blocks of a QuasarAttention layer and an MLP, each after RMSNorm; \
AdamW (weight decay 0.01), the rate rising over 50 steps and constant then. All begin with the \
same weights and see the same batches, on several GPUs cut into equal parts. fp32 is the layer's \
definition by torch operations, without this project's kernels and without tf32. A training ends \
when 99.5% of 4 held-out batches are answered rightly; rounding alone moves the step at which a \
model begins to recall by hundreds. Recall is the share of right \
answers in 16 batches that are not trained on; a step's time is the median over runs of steps \
between two evaluations, by the host's clock between synchronizes."""


def train(device: torch.device, way: str, task: Task, recipe: Recipe) -> Curve:
    """Train one model in one way, in this process or, with its group, on several devices."""
    torch.manual_seed(0)
    model = Model(task.vocabulary, recipe.width, recipe.heads, recipe.layers).to(device)
    return taught(prepare(model, way, device), device, way, task, recipe)


def taught(
    prepared: Prepared,
    device: torch.device,
    way: str,
    task: Task,
    recipe: Recipe,
    replayed: bool = False,
) -> Curve:
    """Train a prepared model in place, in this process or with its group.

    With `replayed`, a GPU replays a recorded step, which one process alone can take.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    started = time.perf_counter()
    replayed = replayed and device.type == "cuda"
    rate = torch.tensor(recipe.rate, device=device) if replayed else recipe.rate
    optimizer = torch.optim.AdamW(prepared.parameters, lr=rate, fused=True, capturable=replayed)

    def taken(tokens: Tensor, places: Tensor, answers: Tensor) -> Tensor:
        loss = recall_loss(prepared.call(tokens, places), answers)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    step_taken = RecordedStep(taken, device) if replayed else taken
    losses, times = [], []
    for first in range(0, recipe.most_steps, recipe.every):
        since = _now(device)
        total = torch.zeros((), device=device)
        for step in range(first, first + recipe.every):
            now = recipe.rate * min(1, (step + 1) / WARMUP)
            for group in optimizer.param_groups:
                group["lr"] = rate.fill_(now) if isinstance(rate, Tensor) else now
            batch = draw(task, step, device).part(rank, world)
            total += step_taken(batch.tokens, batch.places, batch.answers)
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / (recipe.every * world))
        times.append(_now(device) - since)
        if recall(prepared, task, device, BATCHES) >= ENOUGH:
            break
    found = recall(prepared, task, device, LAST_BATCHES)
    return Curve(
        way=way,
        gpus=world,
        losses=tuple(float(f"{loss:.5g}") for loss in losses),
        recall=found,
        steps=recipe.every * len(losses),
        step_ms=1e3 * median(times) / recipe.every,
        seconds=time.perf_counter() - started,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def recall(prepared: Prepared, task: Task, device: torch.device, batches: int) -> float:
    """Return the share of right answers in batches that are not trained on."""
    shares = []
    for n in range(batches):
        batch = draw(task, HELD_OUT + n, device)
        shares.append(recalled(prepared.call(batch.tokens, batch.places), batch.answers))
    share = torch.stack(shares).mean()
    if dist.is_initialized():  # so that all processes go on or end
        dist.all_reduce(share)
        share /= dist.get_world_size()
    return share.item()


def trainings(
    task: Task, recipe: Recipe, ways: Iterable[str], kind: str = "cuda"
) -> Iterable[Curve]:
    """Train in each way that the machine's GPUs allow."""
    several = kind == "cpu" or torch.cuda.device_count() >= GPUS
    for way in ways:
        if way not in ON_SEVERAL_GPUS:
            yield train(torch.device(kind), way, task, recipe)
        elif several:
            yield in_group(GPUS, kind, train, way, task, recipe)


def main() -> None:
    """Train in every way and write the file."""
    args = options(__doc__).parse_args()
    settings = []
    for task, recipe, ways in SETTINGS:
        curves = []
        for curve in trainings(task, recipe, ways):
            say(curve)
            curves.append(curve)
        settings.append(Setting(task=task, recipe=recipe, curves=tuple(curves)))
        run = Recall(protocol=PROTOCOL, settings=tuple(settings), **origin(args.commit))
        write(args.out, run)  # anew after each, so that a run cut short leaves what it has


if __name__ == "__main__":
    main()
