"""Errors of workers without a result: kinds, reasons and remedies."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.imports import install_command
from harness.sample import Correctness, Kind
from harness.terminal import one_line
from quasar_kernels.contract import fork_imports

_KILLED = (-9, 128 + 9)
"""Exit statuses of a worker after SIGKILL, directly and in a confinement."""


USABLE_TMPDIR = "Set TMPDIR to a folder with free space that this user can write."


@dataclass(eq=False, repr=False)
class MeasurementError(Exception):
    """A worker gave no result."""

    reason: str  # a sentence
    kind: Kind
    log_tail: str = ""  # the end of the worker's output, for diagnosis
    correctness: Correctness | None = None  # the correctness check, if it failed
    remedy: str = ""  # a sentence; "" if none is known
    length: int | None = None  # the measured length in tokens, if there are several

    def __post_init__(self) -> None:
        """Put the reason on one printable line: it may name files of a stranger's fork."""
        self.reason = one_line(self.reason)

    def __str__(self) -> str:
        return self.reason

    @property
    def advice(self) -> str:
        """The reason and, if known, the remedy."""
        return f"{self.reason.rstrip('.')}. {self.remedy}" if self.remedy else self.reason

    def explain(self, *, debug: bool = False) -> str:
        """Return kind and advice, and with `debug` the worker's log."""
        text = self.advice if self.kind == "protocol" else f"{self.kind}: {self.advice}"
        if not self.log_tail or self.kind in ("gate", "stopped"):
            return text
        if debug:
            return f"{text}\n{self.log_tail.rstrip()}"
        return f"{text.rstrip('.')}. --debug shows the worker's log."


def not_started(program: str, error: OSError) -> MeasurementError:
    """Return the error for a program that cannot be started, with a remedy if one is known."""
    remedy = ""
    if isinstance(error, (PermissionError, FileNotFoundError)):
        remedy = (
            "Give this user the right to execute it and to search the folders above it, or "
            "install again as this user: remove .venv and run scripts/install.sh, where PYTHON "
            "names an interpreter that all users may execute."
        )
    reason = f"{program} cannot be started ({error.strerror})"
    return MeasurementError(reason, "crash", remedy=remedy)


def without_result(returncode: int) -> tuple[str, Kind]:
    """Return the reason and the kind of a worker's end without a result."""
    if returncode in _KILLED:
        why = "another process killed the worker, most often the kernel for lack of memory"
        return why, "out_of_memory"
    if returncode == 0:
        return "the worker ended without a result", "protocol"
    return f"the worker died with status {returncode}", "crash"


def import_remedy(reason: str) -> str:
    """Return the remedy for a failed import: a command if the package is known."""
    named = re.search(r" needs (?:another )?(\w+)[,:]", reason)
    if named and named[1] in {module.partition(".")[0] for module in fork_imports()}:
        return f"Run {install_command(named[1])}."
    return "Install that module into this Python, if you trust it, or remove the import."
