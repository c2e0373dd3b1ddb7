"""The recall that models of one mixer and hybrids learn, at equal numbers of parameters.

    python -m benchmarks learned_recall --out benchmarks/h200/learned-recall.json

The task and the training are those of the case `recall`, in bf16 autocast. The models consist of
blocks from quasar_kernels.blocks. `--device cpu --width 32 --steps 400` is a trial without a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases.recall import Recipe, train_prepared
from benchmarks.engine.commands import device_option
from benchmarks.engine.results import Entry, Run, start
from benchmarks.models.choices import equal_sizes, parameters, side_by_side
from benchmarks.models.task import Task
from benchmarks.models.ways import Prepared
from quasar_kernels.blocks.language.model import LanguageModel, Sizes

TASK = Task(vocabulary=384, tokens=512, pairs=32, batch=32)
SMALL_TASK = Task(vocabulary=24, tokens=32, pairs=4, batch=16)
"""The task of a trial on a CPU."""

PROTOCOL = """\
Multi-query associative recall as in the case recall, bf16 autocast. Each model has two hybrid \
blocks of the same width and fuses its branches by channel gains. The inner width of its MLP is \
chosen so that all models have as many parameters as a model with all branches and an MLP as wide \
as the model. Seeds change the initial weights; all models see the same batches."""


def trained(device: str, task: Task, recipe: Recipe, mixers: tuple[str, ...], seed: int) -> Entry:
    """Train one model of these mixers from this seed; return its entry of the results."""
    like = Sizes(task.vocabulary, recipe.width, recipe.heads, recipe.layers)
    sizes = equal_sizes(mixers, like)
    torch.manual_seed(seed)
    model = LanguageModel(sizes).to(device)

    def call(tokens: Tensor, places: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits: Tensor = model(tokens, places)
        return logits

    prepared = Prepared(list(model.parameters()), call)
    curve = train_prepared(prepared, torch.device(device), "bf16", task, recipe, replayed=True)
    of = {"mixers": "+".join(mixers), "seed": seed}
    size = {"inner": sizes.inner or 0, "parameters": parameters(sizes)}
    return curve.model_copy(
        update={
            "of": of,
            "figures": {**size, **curve.figures},
        }
    )


def options(parser: argparse.ArgumentParser) -> None:
    device_option(parser)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each model (3)")
    parser.add_argument("--width", type=int, default=512, help="width of every model (512)")
    parser.add_argument("--steps", type=int, default=2000, help="most training steps (2000)")


def measure(args: argparse.Namespace) -> Iterator[Run]:
    on_cpu = args.device == "cpu"
    heads = 2 if on_cpu else 8
    recipe = Recipe(args.steps, args.width, heads, rate=5e-3 if on_cpu else 2e-3)
    task = SMALL_TASK if on_cpu else TASK
    settings = {**task._asdict(), **recipe._asdict(), "seeds": args.seeds}
    run = start("learned_recall", PROTOCOL, args.commit, device=args.device, settings=settings)
    train = partial(trained, args.device, task, recipe)
    return run.growing(side_by_side(train, args.seeds, not on_cpu))
