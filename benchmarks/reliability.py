"""What docs/reliability.md says in figures: a month, mutants, the API under load, decoding.

    python -m benchmarks.reliability [--cycles 2000]

runs the daemon through so many cycles in scaled time and writes benchmarks/reliability.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date, datetime, timezone
from pathlib import Path

from benchmarks.api import page as api
from benchmarks.documents import filled
from benchmarks.inference import page as inference
from benchmarks.mutants import page as mutants
from benchmarks.mutants.results import load as load_mutants
from benchmarks.results import ROOT, Frozen
from harness.source import tree_commit

DATA = ROOT / "benchmarks" / "reliability.json"
DOCUMENT = ROOT / "docs" / "reliability.md"
CHILD = "tests.faults.months.month_child"
MIB = 1024


class Usage(Frozen):
    """The daemon's process after so many cycles."""

    cycles: int
    rss_kib: int
    descriptors: int


class Month(Frozen):
    """Many cycles of one daemon in scaled time; `commit` is what ran, `seconds` how long."""

    created: date
    commit: str | None
    cycles: int
    seconds: float
    early: Usage
    late: Usage


class Reliability(Frozen):
    """What this command measures."""

    month: Month


def load(path: Path = DATA) -> Reliability:
    """Read the figures."""
    return Reliability.model_validate_json(path.read_text(encoding="utf-8"))


def run_month(cycles: int) -> Month:
    """Run the daemon through `cycles` cycles in a process of its own.

    Raises:
        SystemExit: it ended with an error.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="month-") as folder:
        command = [sys.executable, "-m", CHILD, str(Path(folder, "state")), str(cycles)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{CHILD} ended with status {done.returncode}: {done.stderr[-500:]}")
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    early, late = (
        Usage(cycles=after, rss_kib=one["rss_kib"], descriptors=one["descriptors"])
        for after, one in zip((cycles // 10, cycles), told, strict=True)
    )
    return Month(
        created=datetime.now(timezone.utc).date(),
        commit=tree_commit(ROOT),
        cycles=cycles,
        seconds=round(time.monotonic() - began),
        early=early,
        late=late,
    )


def month(found: Month) -> str:
    """Return the table of a month."""
    rows = [
        f"| {one.cycles:,} | {one.rss_kib / MIB:.1f} MiB | {one.descriptors} |"
        for one in (found.early, found.late)
    ]
    head = "| cycles | resident memory | open descriptors |\n| ---: | ---: | ---: |"
    when = f"One run of {found.cycles:,} cycles in {found.seconds:.0f} s, {found.created}"
    return "\n".join([head, *rows, "", f"{when}, commit {(found.commit or 'unknown'):.7}."])


def documents() -> Mapping[Path, str]:
    """Return the text of docs/reliability.md, by its path."""
    found = load()
    sections = {"month": month(found.month), "mutants": mutants.section(load_mutants())}
    sections |= {"load": api.section(api.load()), "inference": inference.section()}
    return {DOCUMENT: filled(DOCUMENT, DOCUMENT.read_text(), sections)}


def main() -> None:
    """Measure a month anew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=2000, help="(2000)")
    given = parser.parse_args()
    if given.cycles < 10:
        parser.error(f"--cycles {given.cycles} must be at least 10")
    made = Reliability(month=run_month(given.cycles))
    DATA.write_text(made.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
