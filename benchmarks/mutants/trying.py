"""Tries mutants in a copy of the tree, each in a fork of this process; started by run.py there.

A fork has what the tests import of other packages already, torch above all, and imports the
project's own modules anew. Reads a job from standard input, writes a line of JSON for each mutant.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import coverage
import pytest

MOST_BYTES = 8 << 30  # a mutant that grows without end is stopped
ANSWER = Path("..", "answer.json")
COVERAGE = Path("..", "coverage")


class Baseline(NamedTuple):
    """How long each test takes without a mutant, and which come past each line of a module."""

    seconds: dict[str, float]
    reached: dict[str, dict[int, set[str]]]


class Watch:
    """How long each test takes, and which failed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase of a test."""
        before = self.seconds.get(report.nodeid, 0.0)
        self.seconds[report.nodeid] = before + report.duration
        if report.failed:
            self.failed.append(report.nodeid)


def run_tests(arguments: list[str], limit: float) -> tuple[int | None, dict[str, Any]]:
    """Run tests in a fork; return its exit status, None past `limit` seconds, and what it says."""
    ANSWER.unlink(missing_ok=True)
    began, child = time.monotonic(), os.fork()
    if child == 0:
        _run_and_answer(arguments)
    status = None
    while status is None and time.monotonic() - began < limit:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):  # its children too, whether or not it has ended
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status, json.loads(ANSWER.read_text()) if ANSWER.exists() else {}


def _run_and_answer(arguments: list[str]) -> NoReturn:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    status, watch = 3, Watch()
    with contextlib.suppress(BaseException):
        always = ["-p", "no:cacheprovider", "--tb=no", "--basetemp=../base"]
        status = int(pytest.main([*always, *arguments], plugins=[watch]))
        loaded = [name for name, one in sys.modules.items() if _foreign(one)]
        ANSWER.write_text(json.dumps({**vars(watch), "loaded": loaded}))
    os._exit(status)


def _foreign(module: object) -> bool:
    """Whether a module belongs to another package, and can be imported before a fork."""
    origin = str(getattr(getattr(module, "__spec__", None), "origin", None) or os.getcwd())
    return not origin.startswith(os.getcwd()) and "conftest" not in origin


def reach(path: str, seconds: dict[str, float]) -> dict[int, set[str]]:
    """Return which tests came past each line, as coverage noted it.

    What is set up for a test may serve others of its file, which then count as well.
    """
    data = coverage.CoverageData(str(COVERAGE))
    data.read()
    beside: dict[str, set[str]] = {}
    for test in seconds:
        beside.setdefault(test.partition("::")[0], set()).add(test)
    reached = {}
    for line, contexts in data.contexts_by_lineno(os.path.abspath(path)).items():
        parts = [context.rpartition("|") for context in contexts if context]
        of_files = [beside[test.partition("::")[0]] for test, _, phase in parts if phase == "setup"]
        reached[line] = {test for test, _, _ in parts}.union(*of_files)
    return reached


def prepare(sources: dict[str, str], files: list[str], limit: float) -> Baseline:
    """Run the tests without a mutant, and import what they import of other packages.

    Raises:
        SystemExit: a test fails.
    """
    sys.dont_write_bytecode = False  # of the tests, once
    os.environ["COVERAGE_FILE"] = str(COVERAGE.absolute())
    modules = [f"--cov={'.'.join(Path(path).with_suffix('').parts)}" for path in sources]
    status, told = run_tests([*modules, "--cov-context=test", "--cov-report=", *files], limit)
    if status != 0:
        sys.exit(f"Tests fail without a mutant (status {status}): {told.get('failed')}")
    # a mutant of the same size, written in the same second, would be taken for the one before
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for path in map(Path, sources):
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
            stale.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in told["loaded"]:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    seconds = told["seconds"]
    return Baseline(seconds, {path: reach(path, seconds) for path in sources})


def main() -> None:
    """Try each mutant of the job on the tests that reach it, the quick and the keen first."""
    job = json.load(sys.stdin)
    sources, files = {path: Path(path).read_text() for path in job["paths"]}, job["tests"]
    seconds, reached = prepare(sources, files, job["limit"])
    keen: Counter[str] = Counter()
    for mutant in job["mutants"]:
        path, (first, last) = mutant["path"], mutant["lines"] or (0, -1)
        tests = set().union(*(reached[path].get(line, set()) for line in range(first, last + 1)))
        tests = tests or set(seconds)
        order = sorted(tests, key=lambda one: (0.1 + seconds[one]) / (1 + 3 * keen[one]))
        patience = max(job["timeout"], 4 * max(seconds[one] for one in order))
        options = ["-x", f"--timeout={patience:.0f}"]
        limit = job["limit"] + 5 * sum(seconds[one] for one in order)
        Path(path).write_text(mutant["code"])
        status, told = run_tests([*options, *order], limit)
        if status == pytest.ExitCode.USAGE_ERROR:  # a parameter in a test's name has changed
            status, told = run_tests([*options, *files], limit)
        Path(path).write_text(sources[path])
        failed = told.get("failed", [])
        keen.update(failed)
        print(json.dumps({"status": status, "failed": failed, "tests": len(order)}), flush=True)


if __name__ == "__main__":
    main()
