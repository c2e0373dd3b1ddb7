"""`python -m harness history FILE`: a committed report's speeds, commit by commit."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.report import ReportError, load_report


@dataclass(frozen=True)
class Entry:
    """A report's version in a commit; `speeds` are tokens/s of the slowest sample, by length."""

    commit: str
    date: str
    subject: str
    speeds: dict[int, float]
    fault: str = ""


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=True
    )
    return done.stdout


def entries(file: Path) -> Iterator[Entry]:
    """Yield the file's versions, the oldest first, one for each commit that changed it."""
    folder, name = file.resolve().parent, file.name
    log = _git(folder, "log", "--reverse", "--format=%h%x09%as%x09%s", "--", name)
    for line in log.splitlines():
        commit, date, subject = line.split("\t", 2)
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as copy:
            try:
                copy.write(_git(folder, "show", f"{commit}:./{name}"))
                copy.flush()
                groups = load_report(Path(copy.name)).by_length()
                speeds = {n: min(m.tokens_per_sec for m in runs) for n, runs in groups.items()}
                yield Entry(commit, date, subject, speeds)
            except subprocess.CalledProcessError:
                yield Entry(commit, date, subject, {}, "deleted")
            except ReportError as error:
                yield Entry(commit, date, subject, {}, str(error).rpartition(": ")[2])


def table(history: Sequence[Entry]) -> str:
    """Return a line for each commit, with speeds in tokens/s and their changes in per cent."""
    lengths = sorted({length for entry in history for length in entry.speeds})
    lines = [f"{'commit':<10} {'date':<10} " + " ".join(f"{n:>21,}" for n in lengths)]
    last: dict[int, float] = {}
    for entry in history:
        cells = []
        for length in lengths:
            speed = entry.speeds.get(length)
            change = ""
            if speed is not None and length in last:
                change = f"{speed / last[length] - 1:+.1%}"
            cells.append(" " * 21 if speed is None else f"{speed:>13,.0f} {change:>7}")
        last |= entry.speeds
        text = " ".join(cells) if entry.speeds else entry.fault
        lines.append(f"{entry.commit:<10} {entry.date:<10} {text}  {entry.subject}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print the history of each file; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness history", description="Show the speeds of committed reports."
    )
    parser.add_argument("file", type=Path, nargs="+", help="a report in a git repository")
    for file in parser.parse_args(argv).file:
        try:
            history = list(entries(file))
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"{file}: {str(error.stderr).strip()}\n")
            return 1
        if not history:
            sys.stderr.write(f"{file}: no commit contains it\n")
            return 1
        sys.stdout.write(f"{file}, tokens/s by length\n{table(history)}\n")
    return 0
