"""A case's command line and its progress messages."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.engine.limits import missed
from benchmarks.engine.results import write
from quasar_kernels.arguments import Parser

_START = time.perf_counter()


def run_case(case: ModuleType, arguments: Sequence[str]) -> int:
    """Measure a case and return the exit status; after each result, write its file and print it.

    A case is a module with `measure(args)`. After each result, this function yields a `Run`
    (results.py) with all entries so far. If the module sets `FAILS`, a missed limit makes the exit
    status 1. Optional functions:

    - `options(parser)` adds arguments.
    - `file_of(run, out)` returns the file for a run, if the case writes several files.
    - `limits(run)` yields criteria.
    """
    name = case.__name__.rpartition(".")[2]
    description = (case.__doc__ or "").partition("\n")[0]
    parser = Parser(f"python -m benchmarks {name}", description=description)
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--commit", help="this project's commit, if this is not a checkout")
    if hasattr(case, "options"):
        case.options(parser)
    args = parser.parse_args(arguments)
    run, printed = None, 0
    for run in case.measure(args):
        if args.out:
            write(case.file_of(run, args.out) if hasattr(case, "file_of") else args.out, run)
        for entry in run.entries[printed:]:
            progress(entry)
        printed = len(run.entries)
    if run is None:
        return 1
    lines = missed(case.limits(run)) if hasattr(case, "limits") else []
    for line in lines:
        print(f"misses its limit: {line}")
    return int(bool(lines) and getattr(case, "FAILS", False))


def fork_option(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the option `--fork`, a checkout of the public fork."""
    without = "" if required else "; default: the installed fla, enough for this project's layer"
    help = f"checkout of the public fork{without}"
    parser.add_argument("--fork", type=Path, required=required, help=help)


def device_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--device`; `cpu` allows a trial without a GPU."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")


def progress(text: object) -> None:
    """Print progress to stderr, with the seconds since the start."""
    print(f"{time.perf_counter() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)
