"""Train models of single mechanisms and of hybrids to recall, at equal parameters.

    python -m benchmarks.recall.mechanisms --out FILE

The task and the training are those of `benchmarks.recall.train`, in bf16 autocast; the models are
of `quasar_kernels.blocks`. `--device cpu --width 32 --steps 400` is a trial without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.commands import options, say
from benchmarks.recall.results import Mechanisms, Recipe, Task, Trained
from benchmarks.recall.train import taught
from benchmarks.recall.ways import Prepared
from benchmarks.results import origin, write
from quasar_kernels.blocks import MIXERS
from quasar_kernels.blocks.language.model import LanguageModel, Sizes

CHOICES = (
    *((name,) for name in MIXERS),
    ("rwkv6", "mamba2"), ("rwkv6", "quasar"), ("mamba2", "quasar"),
    MIXERS,
)  # fmt: skip
"""The branches of each model's blocks."""
TASK = Task(vocabulary=384, tokens=512, pairs=32, batch=32)
SMALL_TASK = Task(vocabulary=24, tokens=32, pairs=4, batch=16)
"""The task of a trial on a CPU."""

PROTOCOL = """\
Multi-query associative recall as in benchmarks.recall.train, bf16 autocast. Two hybrid blocks of \
each choice of branches, all of one width, fusion by channel gains; the inner width of the MLP is \
what gives each model the parameters of one with all branches whose MLP is as wide as the model. \
Seeds change the first weights; all see the same batches."""


def sizes_of(mixers: Sequence[str], task: Task, recipe: Recipe) -> Sizes:
    """Return the sizes of a model of these branches, with as many parameters as any other."""
    width = recipe.width
    of_all = Sizes(task.vocabulary, width, recipe.heads, recipe.layers, MIXERS, inner=width)
    least = of_all._replace(mixers=tuple(mixers), inner=1)
    a_unit = parameters(least._replace(inner=2)) - parameters(least)
    more = (parameters(of_all) - parameters(least)) / a_unit
    return least._replace(inner=1 + round(more))


def parameters(sizes: Sizes) -> int:
    """Return how many parameters a model has; none is made."""
    with torch.device("meta"):
        return sum(p.numel() for p in LanguageModel(sizes).parameters())


def trained(
    mixers: Sequence[str], seed: int, device: torch.device, task: Task, recipe: Recipe
) -> Trained:
    """Train one model."""
    sizes = sizes_of(mixers, task, recipe)
    torch.manual_seed(seed)
    model = LanguageModel(sizes).to(device)

    def call(tokens: Tensor, places: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits: Tensor = model(tokens, places)
        return logits

    curve = taught(Prepared(list(model.parameters()), call), device, "bf16", task, recipe)
    count = parameters(sizes)
    return Trained(
        mixers=tuple(mixers), seed=seed, inner=sizes.inner, parameters=count, curve=curve
    )


def trainings(
    choices: Sequence[Sequence[str]], seeds: int, device: torch.device, task: Task, recipe: Recipe
) -> Iterator[Trained]:
    """Train a model of each choice of branches by each seed."""
    for mixers in choices:
        for seed in range(seeds):
            yield trained(mixers, seed, device, task, recipe)


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
    found: list[Trained] = []
    for training in trainings(CHOICES, args.seeds, torch.device(args.device), task, recipe):
        curve = training.curve
        name = f"{'+'.join(training.mixers)}, seed {training.seed}"
        say(
            f"{name}: {training.parameters:,} parameters, recall {curve.recall:.2%} after "
            f"{curve.steps:,} steps"
        )
        found.append(training)
        known = origin(args.commit, args.device)
        run = Mechanisms(
            protocol=PROTOCOL, task=task, recipe=recipe, trainings=tuple(found), **known
        )
        write(args.out, run)


if __name__ == "__main__":
    main()
