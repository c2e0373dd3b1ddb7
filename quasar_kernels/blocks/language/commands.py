"""The commands `train` and `sample`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from quasar_kernels.blocks.language.checkpoint import CheckpointError, load, model_of
from quasar_kernels.blocks.language.model import sampled
from quasar_kernels.blocks.language.progress import Reporter
from quasar_kernels.blocks.language.ranks import Ranks
from quasar_kernels.blocks.language.settings import CHECKPOINT, CURVE, Recipe, Sizes
from quasar_kernels.blocks.language.stopping import stop_on_signal
from quasar_kernels.blocks.language.training import TextError, Training, read_text
from quasar_kernels.line_plot import FROM_ZERO, GREEN, Line, line_plot

POINTS = 100
"""Largest number of points of the loss curve; each is the mean of equally many steps."""
_CHOICES = ("width", "heads", "layers", "mixers", "fusion", "state", "checkpoint_above")


def run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a command.

    Args:
        words: the command line, for the message that tells how to resume.

    Returns:
        The exit status: 0; 1 for an error; 128 plus the signal's number if a signal ended a
        training.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU here; omit the option")
        if arguments.command == "train":
            return _train(arguments, device, words)
        _sample(arguments, device)
    except OSError as error:
        named = f"{error.filename} cannot be used: {error.strerror}"
        errors.print(named if error.filename else str(error), markup=False)
        return 1
    except (TextError, CheckpointError, ValueError, FloatingPointError) as error:
        errors.print(str(error), markup=False)
        return 1
    return 0


def _train(arguments: argparse.Namespace, device: torch.device, words: Sequence[str]) -> int:
    sizes = Sizes(**{name: getattr(arguments, name) for name in _CHOICES})
    recipe = Recipe(
        tokens=arguments.tokens, batch=arguments.batch, rate=arguments.rate, seed=arguments.seed
    )
    ranks = None
    if arguments.sequence_ranks * arguments.data_ranks > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        ranks = Ranks(arguments.sequence_ranks, arguments.data_ranks, device)
    text, digest = read_text(arguments.text, recipe.tokens)
    arguments.out.mkdir(parents=True, exist_ok=True)
    training = Training(text, digest, arguments.out / CHECKPOINT, sizes, recipe, device, ranks)
    first = ranks is None or ranks.first
    console = Console(highlight=False, soft_wrap=True, markup=False, quiet=not first)
    count = sum(p.numel() for p in training.model.parameters())
    console.print(f"{count:,} parameters on {device.type}, {len(text):,} bytes of text")
    half = torch.bfloat16 if device.type == "cuda" else None
    for name, backend in training.model.backends(half).items():
        console.print(f"  {name}: {backend.name}, {backend.reason}")
    done = len(training.losses)
    if done:
        console.print(f"resuming from step {done:,} of {arguments.out / CHECKPOINT}")
    reporter = Reporter(console, done, arguments.steps)
    with stop_on_signal() as stop, reporter:
        finished = training.run(arguments.steps, arguments.save_seconds, reporter, stop)
    if first:
        (arguments.out / CURVE).write_text(loss_curve(training.losses))
    if not finished:
        again = shlex.join(["python", "-m", "quasar_kernels.blocks.language", *words])
        console.print(
            f"stopped after step {len(training.losses):,} of {arguments.steps:,}, saved in "
            f"{arguments.out / CHECKPOINT}; to resume:\n  {again}"
        )
        return 128 + (stop.signal or 0)
    last = training.losses[-POINTS:]
    console.print(f"loss {sum(last) / len(last):.3f} nats per byte over the last {len(last)} steps")
    console.print(f"{arguments.out / CHECKPOINT} and {arguments.out / CURVE} are written")
    return 0


def loss_curve(losses: Sequence[float]) -> str:
    """Return a chart of the losses as SVG."""
    every = -(-len(losses) // POINTS)
    parts = [losses[n : n + every] for n in range(0, len(losses), every)]
    points = [(n * every + len(part), sum(part) / len(part)) for n, part in enumerate(parts)]
    lines = [Line("loss", GREEN, points)]
    return line_plot("Training loss", "steps", "nats per byte", lines, x=FROM_ZERO)


def _sample(arguments: argparse.Namespace, device: torch.device) -> None:
    model = model_of(load(Path(arguments.model) / CHECKPOINT, device), device)
    prompt = torch.tensor(list(arguments.prompt.encode()), device=device)
    drawn = sampled(model, prompt, arguments.count, arguments.temperature, arguments.seed)
    text = bytes(drawn.tolist()).decode(errors="replace")
    sys.stdout.write(f"{arguments.prompt}{text}\n")
