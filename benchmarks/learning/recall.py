"""Train models of single mechanisms and of hybrids to recall, at equal parameters.

    python -m benchmarks.learning.recall --out benchmarks/h200/learned-recall.json

The task and the training are those of `benchmarks.recall.train`, in bf16 autocast; the models are
of `quasar_kernels.blocks`. `--device cpu --width 32 --steps 400` is a trial without a GPU.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.engine.commands import options, say
from benchmarks.learning.choices import equal_sizes, parameters, side_by_side
from benchmarks.learning.results import LearnedRecall, TaughtToRecall
from benchmarks.recall.results import Recipe, Task
from benchmarks.recall.train import taught
from benchmarks.recall.ways import Prepared
from benchmarks.results import origin, write
from quasar_kernels.blocks.language.model import LanguageModel, Sizes

TASK = Task(vocabulary=384, tokens=512, pairs=32, batch=32)
SMALL_TASK = Task(vocabulary=24, tokens=32, pairs=4, batch=16)
"""The task of a trial on a CPU."""

PROTOCOL = """\
Multi-query associative recall as in benchmarks.recall.train, bf16 autocast. Two hybrid blocks of \
each choice of branches, all of one width, fusion by channel gains; the inner width of the MLP is \
what gives each model the parameters of one with all branches whose MLP is as wide as the model. \
Seeds change the first weights; all see the same batches."""


def trained(
    device: str, task: Task, recipe: Recipe, mixers: tuple[str, ...], seed: int
) -> TaughtToRecall:
    """Train one model."""
    like = Sizes(task.vocabulary, recipe.width, recipe.heads, recipe.layers)
    sizes = equal_sizes(mixers, like)
    torch.manual_seed(seed)
    model = LanguageModel(sizes).to(device)

    def call(tokens: Tensor, places: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits: Tensor = model(tokens, places)
        return logits

    prepared = Prepared(list(model.parameters()), call)
    curve = taught(prepared, torch.device(device), "bf16", task, recipe, replayed=True)
    return TaughtToRecall(
        mixers=mixers, seed=seed, inner=sizes.inner, parameters=parameters(sizes), curve=curve
    )


def main() -> None:
    """Train every model, and write the file anew after each."""
    parser = options(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each model (3)")
    parser.add_argument("--width", type=int, default=512, help="of every model (512)")
    parser.add_argument("--steps", type=int, default=2000, help="at most (2000)")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    heads = 2 if on_cpu else 8
    recipe = Recipe(args.steps, args.width, heads, rate=5e-3 if on_cpu else 2e-3)
    task = SMALL_TASK if on_cpu else TASK
    train = partial(trained, args.device, task, recipe)
    known, found = origin(args.commit, args.device), list[TaughtToRecall]()
    for training in side_by_side(train, args.seeds, not on_cpu):
        curve, name = training.curve, "+".join(training.mixers)
        say(f"{name}, seed {training.seed}: recall {curve.recall:.2%}, {curve.steps:,} steps")
        found.append(training)
        run = LearnedRecall(
            protocol=PROTOCOL,
            task=task,
            recipe=recipe,
            seeds=args.seeds,
            trainings=tuple(found),
            **known,
        )
        write(args.out, run)


if __name__ == "__main__":
    main()
