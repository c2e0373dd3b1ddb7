"""Train models of single mechanisms and of hybrids on a text, at equal parameters.

    python -m benchmarks.learning.text --out benchmarks/h200/learned-text.json

The text is Python's own documentation, which comes with it as a module; its last tenth is held out.
`--device cpu --width 64 --steps 100` is a trial without a GPU.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engine.commands import options, say
from benchmarks.learning.choices import equal_sizes, parameters, side_by_side
from benchmarks.learning.results import EVERY, LearnedText, TaughtText, TextRecipe
from benchmarks.results import origin, write
from quasar_kernels.blocks.language.model import LanguageModel, Sizes, next_token_loss
from quasar_kernels.blocks.language.settings import Recipe
from quasar_kernels.blocks.language.training import Training, read_text

TEXT = Path(pydoc_data.topics.__file__)
HELD_OUT = 0.1
"""Share of the text, at its end, that no training sees."""

PROTOCOL = """\
Models of bytes: hybrid blocks of each choice of branches, all of one width, fusion by channel \
gains; the inner width of the MLP is what gives each model the parameters of one with all branches \
whose MLP is as wide as the model. AdamW (weight decay 0.01, gradients clipped to a norm of 1), \
the rate rising over 50 steps and constant then, bf16 autocast on a GPU and fp32 on a CPU. A seed \
changes the first weights and the batches. Held out: the mean loss of the text's last tenth, in \
sequences of the trained length one after the other."""


def split() -> tuple[Tensor, Tensor]:
    """Return the bytes `[N]` uint8 that are trained on, and those that are held out."""
    text, _ = read_text(TEXT, 1)
    place = round(len(text) * (1 - HELD_OUT))
    return text[:place], text[place:]


def trained(device: str, recipe: TextRecipe, mixers: tuple[str, ...], seed: int) -> TaughtText:
    """Train one model."""
    text, rest = split()
    like = Sizes(width=recipe.width, heads=recipe.heads, layers=recipe.layers)
    sizes = equal_sizes(mixers, like)
    how = Recipe(recipe.tokens, recipe.batch, recipe.rate, seed=seed)
    nowhere = Path("not written")  # a checkpoint is saved by `run` alone
    training = Training(text, "", nowhere, sizes, how, torch.device(device))
    losses = [training.step() for _ in range(recipe.steps)]
    points = [losses[n : n + EVERY] for n in range(0, len(losses), EVERY)]
    return TaughtText(
        mixers=mixers,
        seed=seed,
        inner=sizes.inner,
        parameters=parameters(sizes),
        losses=tuple(float(f"{sum(point) / len(point):.5g}") for point in points),
        held_out=loss_of(training.model, rest, recipe),
    )


@torch.no_grad()
def loss_of(model: LanguageModel, text: Tensor, recipe: TextRecipe) -> float:
    """Return the mean loss of a text `[N]` uint8, in nats a byte; what is over is left out."""
    device = next(model.parameters()).device
    count = len(text) // recipe.tokens
    sequences = text[: count * recipe.tokens].view(count, recipe.tokens)
    total = 0.0
    for part in torch.split(sequences, recipe.batch):
        tokens = part.to(device).long()
        with torch.autocast("cuda", torch.bfloat16, device.type == "cuda"):
            total += len(part) * next_token_loss(model(tokens), tokens).item()
    return total / count


def main() -> None:
    """Train every model, and write the file anew after each."""
    parser = options(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each model (3)")
    usual, sizes = TextRecipe(), ("width", "layers", "steps", "tokens", "batch")
    for name in sizes:
        default = getattr(usual, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in sizes}
    recipe = usual._replace(**given)
    content = TEXT.read_bytes()
    python = ".".join(map(str, sys.version_info[:3]))
    text = (
        f"pydoc_data/{TEXT.name} of Python {python}, {len(content):,} bytes, "
        f"SHA-256 {hashlib.sha256(content).hexdigest()[:16]}"
    )
    known, found = origin(args.commit, args.device), list[TaughtText]()
    train = partial(trained, args.device, recipe)
    for training in side_by_side(train, args.seeds, args.device == "cuda"):
        name = "+".join(training.mixers)
        say(f"{name}, seed {training.seed}: {training.held_out:.4f} nats a byte, held out")
        found.append(training)
        run = LearnedText(
            protocol=PROTOCOL,
            text=text,
            recipe=recipe,
            seeds=args.seeds,
            trainings=tuple(found),
            **known,
        )
        write(args.out, run)


if __name__ == "__main__":
    main()
