"""Models of what the tests of tests/gpu said on one GPU, and the table made of it."""

from __future__ import annotations

from pydantic import Field

from benchmarks.report.markdown import facts, table
from benchmarks.results import Frozen, Run


class Outcome(Frozen):
    """How many tests of one file passed, failed and were skipped."""

    passed: int = Field(default=0, ge=0)
    failed: int = Field(default=0, ge=0, description="1 for a process that came to no end")
    skipped: int = Field(default=0, ge=0)
    failures: tuple[str, ...] = Field(default=(), description="which failed, or how it ended")


class GpuTests(Run):
    """A run on one GPU."""

    files: dict[str, Outcome] = Field(description="by name, as the files were called at the commit")
    left_out: tuple[str, ...] = Field(default=(), description="files of tests/gpu that did not run")

    def total(self, outcome: str) -> int:
        """Return how many tests `passed`, `failed` or were `skipped`."""
        return sum(getattr(file, outcome) for file in self.files.values())


def gpu_tests_table(run: GpuTests) -> str:
    """Return where the tests ran and how each file did; failures and what did not run by name."""
    outcomes = ("passed", "failed", "skipped")
    where = facts(run.where())
    rows = [(name, *(str(getattr(file, o)) for o in outcomes)) for name, file in run.files.items()]
    rows.append(("all of them", *(str(run.total(o)) for o in outcomes)))
    notes = [f"Failed: {', '.join(named)}." for named in [failures(run)] if named]
    notes += [f"Not part of this run: {', '.join(run.left_out)}."] if run.left_out else []
    return "\n\n".join([where, table(("file", *outcomes), rows), *notes])


def failures(run: GpuTests) -> list[str]:
    """Name every test that failed, with its file."""
    return [f"{name}: {one}" for name, file in run.files.items() for one in file.failures]
