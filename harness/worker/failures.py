"""Failures of a worker: their kinds, and the kind of an exception of the code under test."""

from __future__ import annotations

from typing import TypedDict

from harness.sample import Kind


class WorkerError(Exception):
    """A failure whose kind is known."""

    def __init__(self, reason: str, kind: Kind) -> None:
        super().__init__(reason)
        self.kind: Kind = kind


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text
        or "can't allocate memory" in text
        or "cublas_status_alloc_failed" in text  # cuBLAS's message
    )


class FailureFields(TypedDict):
    """A failure as another process receives it."""

    reason: str
    kind: Kind


def describe_failure(error: Exception) -> FailureFields:
    """Return the kind and the reason of an exception."""
    if isinstance(error, WorkerError):
        return {"reason": str(error), "kind": error.kind}
    first = (str(error).splitlines() or [""])[0]
    reason = f"{type(error).__name__}: {first}"
    return {"reason": reason, "kind": "out_of_memory" if _out_of_memory(error) else "crash"}
