"""What the measuring commands share: options, progress, and processes of their own."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.results import ROOT

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


def run_for(
    seconds: float, command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[str, int | None]:
    """Run a command in the project's folder; return what it said on both streams and its status.

    The status is None where it took longer than `seconds`, and was killed with its children.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=seconds)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children hold the pipe, too
        return process.communicate()[0], None


def tool_version(tool: str, source: str) -> str:
    """Return the version of a tool of NVIDIA's on PATH.

    Raises:
        SystemExit: it is not there; `source` says what brings it.
    """
    if shutil.which(tool) is None:
        sys.exit(f"{tool} is not on PATH; it comes with {source}")
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"[Vv]ersion (\S+)", said)
    return found[1] if found else said.strip()
