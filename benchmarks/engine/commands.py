"""A case's command line, progress messages, and subprocesses with a time limit."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.engine.limits import missed
from benchmarks.engine.results import ROOT, Run, write
from quasar_kernels.arguments import Parser

_START = time.perf_counter()


def run_case(case: ModuleType, arguments: Sequence[str]) -> int:
    """Measure a case, print its entries and write its file after each; return the exit status.

    A case is a module with `measure(args)`, which yields the run after each result. If the module
    sets `FAILS`, a missed limit makes the exit status 1. Optional functions:

    - `options(parser)` adds arguments.
    - `file_of(run, out)` returns the file of a run, if there are several.
    - `limits(run)` yields criteria, or `misses(run)` returns a line for each missed limit.
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
    lines = misses(case, run)
    for line in lines:
        print(f"misses its limit: {line}")
    return int(bool(lines) and getattr(case, "FAILS", False))


def misses(case: ModuleType, run: Run) -> list[str]:
    if hasattr(case, "misses"):
        return list(case.misses(run))
    return missed(case.limits(run)) if hasattr(case, "limits") else []


def fork_option(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the option `--fork`, a checkout of the public fork."""
    without = "" if required else "; default: the installed fla, for this project's layer only"
    help = f"checkout of the public fork{without}"
    parser.add_argument("--fork", type=Path, required=required, help=help)


def device_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--device`; `cpu` allows a trial without a GPU."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")


def progress(text: object) -> None:
    """Print progress to stderr, with the seconds since the start."""
    print(f"{time.perf_counter() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)


def run_for(
    seconds: float, command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[str, int | None]:
    """Run a command in the project's folder; return its output on both streams and its status.

    After `seconds` the command and its children are killed, and the status is None.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=seconds)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children also hold the pipe open
        return process.communicate()[0], None


def python(module: str, *arguments: Any) -> list[str]:
    """Return the command that runs a module of this project with this interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]
