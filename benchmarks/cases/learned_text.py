"""The loss on a text of models with one mixer and of hybrids, at equal numbers of parameters.

    python -m benchmarks learned_text --out benchmarks/h200/learned-text.json

The text is a part of Python's documentation that Python contains as a module. Its last tenth is
held out. `--device cpu --width 64 --steps 100` is a trial without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import pydoc_data.topics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.engine.commands import device_option
from benchmarks.engine.results import Entry, Run, start
from benchmarks.models.choices import equal_sizes, parameters, side_by_side
from quasar_kernels.blocks.language.model import LanguageModel, Sizes, next_token_loss
from quasar_kernels.blocks.language.settings import Recipe
from quasar_kernels.blocks.language.training import Training, read_text

TEXT = Path(pydoc_data.topics.__file__)
HELD_OUT = 0.1
"""Share of the text, at its end, that is held out from training."""

EVERY = 10
"""Steps that one point of a loss curve averages."""

PROTOCOL = """\
Models of bytes: hybrid blocks of each choice of branches, all of one width, fusion by channel \
gains. The inner width of the MLP is chosen so that all models have as many parameters as a model \
with all branches and an MLP as wide as the model. AdamW (weight decay 0.01, gradients clipped to \
a norm of 1), the rate rising over 50 steps and constant then, bf16 autocast on a GPU and fp32 on \
a CPU. A seed changes the initial weights and the batches. Held out: the mean loss over the text's \
last tenth, cut into sequences of the trained length."""


class TextRecipe(NamedTuple):
    steps: int = 400
    width: int = 256
    heads: int = 4
    layers: int = 4
    tokens: int = 512  # of a sequence
    batch: int = 32  # sequences
    rate: float = 2e-3


def split() -> tuple[Tensor, Tensor]:
    """Return the bytes `[N]` uint8 that are trained on, and those that are held out."""
    text, _ = read_text(TEXT, 1)
    place = round(len(text) * (1 - HELD_OUT))
    return text[:place], text[place:]


def trained(device: str, recipe: TextRecipe, mixers: tuple[str, ...], seed: int) -> Entry:
    text, rest = split()
    like = Sizes(width=recipe.width, heads=recipe.heads, layers=recipe.layers)
    sizes = equal_sizes(mixers, like)
    how = Recipe(recipe.tokens, recipe.batch, recipe.rate, seed=seed)
    unused = Path("not written")  # only `run` saves a checkpoint
    training = Training(text, "", unused, sizes, how, torch.device(device))
    losses = [training.step() for _ in range(recipe.steps)]
    points = [losses[n : n + EVERY] for n in range(0, len(losses), EVERY)]
    means = tuple(float(f"{sum(point) / len(point):.5g}") for point in points)
    return Entry(
        table="trainings",
        of={"mixers": "+".join(mixers), "seed": seed},
        figures={
            "inner": sizes.inner or 0,
            "parameters": parameters(sizes),
            "held_out": loss_of(training.model, rest, recipe),
        },
        series={"losses": means},
    )


@torch.no_grad()
def loss_of(model: LanguageModel, text: Tensor, recipe: TextRecipe) -> float:
    """Return the mean loss of a text `[N]` uint8 over its full sequences, in nats per byte."""
    device = next(model.parameters()).device
    count = len(text) // recipe.tokens
    sequences = text[: count * recipe.tokens].view(count, recipe.tokens)
    total = 0.0
    for part in torch.split(sequences, recipe.batch):
        tokens = part.to(device).long()
        with torch.autocast("cuda", torch.bfloat16, device.type == "cuda"):
            total += len(part) * next_token_loss(model(tokens), tokens).item()
    return total / count


SIZES = ("width", "layers", "steps", "tokens", "batch")


def options(parser: argparse.ArgumentParser) -> None:
    device_option(parser)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each model (3)")
    for name in SIZES:
        default = getattr(TextRecipe(), name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")


def text_version() -> str:
    """Return the text's name, size and SHA-256."""
    content = TEXT.read_bytes()
    python = ".".join(map(str, sys.version_info[:3]))
    digest = hashlib.sha256(content).hexdigest()[:16]
    return f"pydoc_data/{TEXT.name} of Python {python}, {len(content):,} bytes, SHA-256 {digest}"


def measure(args: argparse.Namespace) -> Iterator[Run]:
    recipe = TextRecipe()._replace(**{name: getattr(args, name) for name in SIZES})
    settings = {"text": text_version(), **recipe._asdict(), "seeds": args.seeds}
    run = start("learned_text", PROTOCOL, args.commit, device=args.device, settings=settings)
    train = partial(trained, args.device, recipe)
    return run.growing(side_by_side(train, args.seeds, args.device == "cuda"))
