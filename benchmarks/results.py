"""What all files of measurements have in common: models, and how they are read and written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeVar

from harness.hardware.machine import Environment
from harness.hardware.machine import Frozen as Frozen
from harness.hardware.machine import NotNegative as NotNegative
from harness.hardware.machine import Positive as Positive
from harness.source import tree_commit

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "h200"
"""The data that the documents show."""


class Run(Frozen):
    """One run of a measuring command on one machine: a file."""

    schema_version: Literal[1] = 1
    created: date
    commit: str | None
    environment: Environment

    def where(self, *more: str) -> dict[str, str]:
        """Return the facts of where and when: the machine, versions, `more`, the commit."""
        e = self.environment
        machine = f"{e.gpu}, driver {e.driver}" if e.gpu else f"no GPU, {e.cpu}"
        return {
            "GPU": "; ".join([machine, versions(e), *more]),
            "date, commit": f"{self.created}, {self.commit}",
        }


def versions(environment: Environment) -> str:
    """Return the versions that figures depend on, as they were recorded with the figures."""
    return f"torch {environment.torch}, Triton {environment.triton}"


Kind = TypeVar("Kind", bound=Run)


def load(kind: type[Kind], path: Path) -> Kind:
    """Read a run's file.

    Raises:
        OSError, pydantic.ValidationError: it is missing, or is no run of this kind.
    """
    return kind.model_validate_json(path.read_text(encoding="utf-8"))


def told(kind: type[Kind], path: Path, tell: Callable[[Kind], str]) -> str:
    """Return what `tell` makes of a run, or the sentence that there is none yet.

    Raises:
        pydantic.ValidationError: the file is no run of this kind.
    """
    return tell(load(kind, path)) if path.exists() else "No run of it is committed yet."


def write(path: Path, run: Run) -> None:
    """Write a file that `load` reads: whatever happens, the old one or the new, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(run.model_dump_json(indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def origin(commit: str | None, device: str = "cuda") -> dict[str, Any]:
    """Return a run's own fields: today, `commit` or the checkout's, and this machine with its GPU.

    `device` is "cpu" for a trial without one.

    It imports torch, which tells of the GPU.
    """
    import torch

    from harness.worker.machine.environment import describe

    return {
        "created": datetime.now(timezone.utc).date(),
        "commit": commit or tree_commit(ROOT),
        "environment": describe(torch.device(device)),
    }
