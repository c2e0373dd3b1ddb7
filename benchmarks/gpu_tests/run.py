"""Run the tests of tests/gpu on this machine, files side by side, and write how they came out.

    python -m benchmarks.gpu_tests.run --out benchmarks/h200/gpu-tests.json [--only test_chunk ...]

Each file runs in a process of its own, which needs pytest and none of its plugins; those that watch
the GPU's memory run alone, after the others. What fails is said at its end, and decides the exit
status; the file is written whatever the outcome.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.engine import commands
from benchmarks.engine.commands import say
from benchmarks.gpu_tests.results import GpuTests, Outcome, failures
from benchmarks.results import ROOT, origin, write

TESTS = ROOT / "tests" / "gpu"
ALONE = ("test_faults",)
LIMIT = 500
"""Seconds after which a file is cut off."""


def run_file(path: Path, limit: float = LIMIT) -> Outcome:
    """Run one file's tests and count them; what it printed is said where something failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # the options of pyproject.toml ask for plugins that a GPU machine may lack
        options = ("-q", "-o", "addopts=--import-mode=importlib", f"--junitxml={report}")
        command = commands.python("pytest", *options, path)
        said, status = commands.run_for(limit, command)
        if status in (0, 1) and report.exists():
            outcome = count(report)
        else:
            cut_off = f"was cut off after {limit:g} s"
            ended = cut_off if status is None else f"ended with status {status}"
            outcome = Outcome(failed=1, failures=(ended,))
    say(f"{path.name}: {outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped")
    if outcome.failed:
        print(said, file=sys.stderr, flush=True)
    return outcome


def count(report: Path) -> Outcome:
    """Count the tests of a JUnit report that pytest wrote."""
    cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 pytest wrote it
    failed = [c.get("name", "") for c in cases if {"failure", "error"} & {part.tag for part in c}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Outcome(
        passed=len(cases) - len(failed) - skipped,
        failed=len(failed),
        skipped=skipped,
        failures=tuple(failed),
    )


def run(only: Sequence[str], commit: str | None) -> GpuTests:
    """Run all files, or those whose names are given, half as many at once as there are cores."""
    found = {path.relative_to(TESTS).as_posix(): path for path in sorted(TESTS.rglob("test_*.py"))}
    wanted = {name: path for name, path in found.items() if not only or path.stem in only}
    files = {name: path for name, path in wanted.items() if path.stem not in ALONE}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        outcomes = dict(zip(files, pool.map(run_file, files.values()), strict=True))
    outcomes |= {name: run_file(path) for name, path in wanted.items() if name not in files}
    left_out = tuple(name for name in found if name not in wanted)
    return GpuTests(**origin(commit), files=outcomes, left_out=left_out)


def main() -> int:
    """Run the tests, write the file, and return the exit status."""
    parser = commands.options(__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="names of files, without .py")
    args = parser.parse_args()
    found = run(args.only, args.commit)
    write(args.out, found)
    for failure in failures(found):
        print(f"failed: {failure}")
    return int(found.total("failed") > 0)


if __name__ == "__main__":
    sys.exit(main())
