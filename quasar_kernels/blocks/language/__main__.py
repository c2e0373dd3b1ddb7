"""The command line: train a model on a text, and sample from it."""

from __future__ import annotations

from quasar_kernels import interrupts

if __name__ == "__main__":
    interrupts.exit_on_ctrl_c()  # until the imports below are done

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from quasar_kernels.arguments import positive
from quasar_kernels.blocks import MIXERS
from quasar_kernels.blocks.language.settings import CHECKPOINT, CURVE, Recipe, Sizes


def _mixers(text: str) -> tuple[str, ...]:
    return tuple(text.split("+"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quasar_kernels.blocks.language",
        description="Train a small language model over bytes, and sample from it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="train on a file, or resume",
        description="Train on a file. The same command resumes from the last checkpoint. SIGTERM "
        "or Ctrl-C stops the training after the current step and saves a checkpoint.",
    )
    train.add_argument("--text", type=Path, required=True, help="any file; its bytes are tokens")
    train.add_argument(
        "--out",
        type=Path,
        default=Path("model"),
        help=f"folder of {CHECKPOINT} and {CURVE} (model)",
    )
    train.add_argument("--steps", type=positive, default=1000, help="total number of steps (1000)")
    train.add_argument(
        "--save-seconds", type=positive, default=60, help="seconds between checkpoints (60)"
    )
    sizes, recipe = Sizes(), Recipe()
    train.add_argument(
        "--mixers",
        type=_mixers,
        default=sizes.mixers,
        help=f"branches joined by + ({'+'.join(MIXERS)})",
    )
    train.add_argument("--fusion", default=sizes.fusion, help="gains, gated or mean (gains)")
    for name in ("width", "heads", "layers", "state"):
        default = getattr(sizes, name)
        train.add_argument(f"--{name}", type=positive, default=default, help=f"({default})")
    train.add_argument(
        "--checkpoint-above", type=positive, help="length above which blocks are recomputed"
    )
    for name, text in (("tokens", "bytes per sequence"), ("batch", "sequences per step")):
        default = getattr(recipe, name)
        train.add_argument(f"--{name}", type=positive, default=default, help=f"{text} ({default})")
    train.add_argument(
        "--rate", type=float, default=recipe.rate, help=f"learning rate ({recipe.rate})"
    )
    train.add_argument("--seed", type=int, default=recipe.seed, help=f"({recipe.seed})")
    for name, text in (
        ("sequence", "processes that share each sequence, started by torchrun (1)"),
        ("data", "groups of such processes, each of which gets a part of the batch (1)"),
    ):
        train.add_argument(f"--{name}-ranks", type=positive, default=1, help=text)
    sample = commands.add_parser("sample", help="draw a text from a trained model")
    sample.add_argument("--model", type=Path, default=Path("model"), help="train's --out (model)")
    sample.add_argument("--prompt", default="\n", help="beginning of the text")
    sample.add_argument("--count", type=positive, default=400, help="number of bytes (400)")
    sample.add_argument("--temperature", type=float, default=0.8, help="(0.8)")
    sample.add_argument("--seed", type=int, default=0, help="(0)")
    for command in (train, sample):
        command.add_argument(
            "--device", choices=["cuda", "cpu"], help="default: a GPU if there is one"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the status of `commands.run`, or 130 after an interrupt."""
    words = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(words)
    try:
        from quasar_kernels.blocks.language.commands import run  # torch and fla-core take seconds

        return run(arguments, words)
    except KeyboardInterrupt:
        if arguments.command == "train":
            sys.stderr.write("interrupted; the same command resumes from the last checkpoint\n")
        return 130


if __name__ == "__main__":
    interrupts.run(main)
