"""The tests of tests/gpu on this machine, several files at a time, with their outcome as data.

    python -m benchmarks gpu_tests --out benchmarks/h200/gpu-tests.json

Each file runs in its own process, which needs pytest without plugins. Files that measure the GPU's
memory run alone, after the others. A failure is printed and sets the exit status. The results are
written after each file, so that an interrupted run keeps them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.engine import commands
from benchmarks.engine.results import ROOT, Entry, Run, start

FAILS = True
TESTS = ROOT / "tests" / "gpu"
ALONE = ("test_faults",)
LIMIT = 500
"""Seconds after which a file's process is killed."""


def run_file(path: Path, limit: float = LIMIT) -> Entry:
    """Run one file's tests and count the outcomes; print the output if a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # the options of pyproject.toml require plugins that a GPU machine may lack
        options = ("-q", "-o", "addopts=--import-mode=importlib", f"--junitxml={report}")
        command = commands.python("pytest", *options, path)
        output, status = commands.run_for(limit, command)
        if status in (0, 1) and report.exists():
            figures, failure = count(report)
        else:
            cut_off = f"was cut off after {limit:g} s"
            ended = cut_off if status is None else f"ended with status {status}"
            figures, failure = {"passed": 0, "failed": 1, "skipped": 0}, ended
    if failure:
        print(output, file=sys.stderr, flush=True)
    name = path.relative_to(TESTS).as_posix()
    return Entry(table="files", of={"file": name}, figures=figures, failure=failure or None)


def count(report: Path) -> tuple[dict[str, int], str]:
    """Return the numbers of tests by outcome in pytest's JUnit report, and the failed tests."""
    cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 pytest wrote it
    failed = [c.get("name", "") for c in cases if {"failure", "error"} & {part.tag for part in c}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    return {"passed": passed, "failed": len(failed), "skipped": skipped}, ", ".join(failed)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    """Run all files, half as many at once as there are cores."""
    paths = sorted(TESTS.rglob("test_*.py"))
    together = [path for path in paths if path.stem not in ALONE]
    entries: list[Entry] = []

    def added(entry: Entry) -> Run:
        entries.append(entry)
        ran = {one.of["file"] for one in entries}
        names = (path.relative_to(TESTS).as_posix() for path in paths)
        left_out = ", ".join(name for name in names if name not in ran)
        run = start("gpu_tests", "", args.commit, settings={"left out": left_out})
        return run.adding(*entries)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for done in as_completed([pool.submit(run_file, path) for path in together]):
            yield added(done.result())
    for path in paths:
        if path not in together:
            yield added(run_file(path))


def misses(run: Run) -> list[str]:
    """Return a line for each failed test, with its file."""
    return [f"{entry.of['file']}: {entry.failure}" for entry in run.entries if entry.failure]
