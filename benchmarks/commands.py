"""What the measuring commands share: options, progress, and processes of their own."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

_START = time.perf_counter()


def options(doc: str | None, *, fork: bool = False, writes: bool = True) -> argparse.ArgumentParser:
    """Return a parser that knows `--out`, `--commit`, and `--fork` where it is asked for.

    Args:
        doc: the command's docstring, whose first line describes it.
        writes: `--out` must be given.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if fork:
        parser.add_argument("--fork", type=Path, required=True, help="checkout of the public fork")
    parser.add_argument("--out", type=Path, required=writes, help="where the results are written")
    parser.add_argument("--commit", help="this project's commit, where git cannot tell")
    return parser


def say(text: object) -> None:
    """Report progress, with the seconds since the start."""
    print(f"{time.perf_counter() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)


def python(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of this project by this Python."""
    return [sys.executable, "-m", module, *map(str, arguments)]
