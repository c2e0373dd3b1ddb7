"""The command line: train a model on a text, and sample from it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quasar_kernels.arguments import positive
from quasar_kernels.blocks import MIXERS
from quasar_kernels.blocks.fusion import FUSIONS
from quasar_kernels.blocks.language.checkpoint import CheckpointError, Recipe, load, model_of
from quasar_kernels.blocks.language.model import Sizes, sampled
from quasar_kernels.blocks.language.training import TextError, Training, read_text
from quasar_kernels.line_plot import Line, line_plot

CHECKPOINT, CURVE = "model.pt", "loss.svg"
POINTS = 100
"""Most points of the loss curve, each a mean of as many steps."""


def _mixers(text: str) -> tuple[str, ...]:
    return tuple(text.split("+"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quasar_kernels.blocks.language",
        description="Train a small language model of bytes, and sample from it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train on a file, or go on where it ended")
    train.add_argument("--text", type=Path, required=True, help="any file; its bytes are tokens")
    train.add_argument("--out", type=Path, default=Path("model"),
                       help=f"folder of {CHECKPOINT} and {CURVE} (model)")  # fmt: skip
    train.add_argument("--steps", type=positive, default=1000, help="in all (1000)")
    train.add_argument("--save-every", type=positive, default=100, help="steps (100)")
    sizes, recipe = Sizes(), Recipe()
    train.add_argument("--mixers", type=_mixers, default=sizes.mixers,
                       help=f"branches joined by + ({'+'.join(MIXERS)})")  # fmt: skip
    train.add_argument("--fusion", choices=FUSIONS, default=sizes.fusion)
    for name in ("width", "heads", "layers", "state"):
        default = getattr(sizes, name)
        train.add_argument(f"--{name}", type=positive, default=default, help=f"({default})")
    train.add_argument("--checkpoint-above", type=positive,
                       help="tokens beyond which blocks are computed again")  # fmt: skip
    train.add_argument("--tokens", type=positive, default=recipe.tokens,
                       help=f"of a sequence ({recipe.tokens})")  # fmt: skip
    train.add_argument("--batch", type=positive, default=recipe.batch,
                       help=f"sequences ({recipe.batch})")  # fmt: skip
    train.add_argument("--rate", type=float, default=recipe.rate, help=f"({recipe.rate})")
    train.add_argument("--seed", type=int, default=recipe.seed, help=f"({recipe.seed})")
    sample = commands.add_parser("sample", help="draw a text from a trained model")
    sample.add_argument("--model", type=Path, default=Path("model"), help="train's --out (model)")
    sample.add_argument("--prompt", default="\n", help="what the text goes on from")
    sample.add_argument("--count", type=positive, default=400, help="bytes (400)")
    sample.add_argument("--temperature", type=float, default=0.8, help="(0.8)")
    sample.add_argument("--seed", type=int, default=0, help="(0)")
    for command in (train, sample):
        command.add_argument("--device", choices=["cuda", "cpu"], help="a GPU where there is one")
    return parser


@contextmanager
def _bar(console: Console, done: int, steps: int) -> Iterator[Progress]:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as progress:
        progress.add_task("", completed=done, total=steps)
        yield progress


def _train(arguments: argparse.Namespace, device: torch.device, console: Console) -> None:
    sizes = Sizes(
        width=arguments.width, heads=arguments.heads, layers=arguments.layers,
        mixers=arguments.mixers, fusion=arguments.fusion, state=arguments.state,
        checkpoint_above=arguments.checkpoint_above,
    )  # fmt: skip
    recipe = Recipe(
        tokens=arguments.tokens, batch=arguments.batch, rate=arguments.rate, seed=arguments.seed
    )
    text, digest = read_text(arguments.text, recipe.tokens)
    arguments.out.mkdir(parents=True, exist_ok=True)
    training = Training(text, digest, arguments.out / CHECKPOINT, sizes, recipe, device)
    count = sum(p.numel() for p in training.model.parameters())
    console.print(f"{count:,} parameters on {device.type}, {len(text):,} bytes of text")
    half = torch.bfloat16 if device.type == "cuda" else None
    for name, backend in training.model.backends(half).items():
        console.print(f"  {name}: {backend.name}, {backend.reason}", markup=False)
    if training.losses:
        console.print(f"going on from step {len(training.losses):,}")
    with _bar(console, len(training.losses), arguments.steps) as bar:

        def told(done: int, loss: float) -> None:
            bar.update(bar.task_ids[0], completed=done, description=f"loss {loss:.3f}")

        training.run(arguments.steps, arguments.save_every, told)
    (arguments.out / CURVE).write_text(loss_curve(training.losses))
    last = training.losses[-POINTS:]
    console.print(f"loss {sum(last) / len(last):.3f} nats a byte over the last {len(last)} steps")
    console.print(f"{arguments.out / CHECKPOINT} and {arguments.out / CURVE} are written")


def loss_curve(losses: Sequence[float]) -> str:
    """Return the SVG of the losses by steps, in means of equal parts."""
    every = -(-len(losses) // POINTS)
    parts = [losses[n : n + every] for n in range(0, len(losses), every)]
    points = [(n * every + len(part), sum(part) / len(part)) for n, part in enumerate(parts)]
    return line_plot("Training loss", "steps", "nats a byte", [Line("loss", "#0b6e4f", points)])


def _sample(arguments: argparse.Namespace, device: torch.device) -> None:
    model = model_of(load(arguments.model / CHECKPOINT, device), device)
    prompt = torch.tensor(list(arguments.prompt.encode()), device=device)
    drawn = sampled(model, prompt, arguments.count, arguments.temperature, arguments.seed)
    text = bytes(drawn.tolist()).decode(errors="replace")
    sys.stdout.write(f"{arguments.prompt}{text}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 where something needs a person, 130 where interrupted."""
    arguments = _parser().parse_args(argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU here; leave it out")
        if arguments.command == "train":
            _train(arguments, device, console)
        else:
            _sample(arguments, device)
    except OSError as error:
        named = f"{error.filename} cannot be used: {error.strerror}"
        console.print(named if error.filename else str(error), markup=False)
        return 1
    except (TextError, CheckpointError, ValueError, FloatingPointError) as error:
        console.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from the last checkpoint")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
