"""Failures of a worker: their kinds, and the kind of an exception of the code under test."""

from __future__ import annotations

from harness.sample import Kind

_WITHOUT_GPU = ("module 'torch.cpu' has no attribute", "0 active drivers")
"""Messages of fla and Triton whose cause is a missing GPU."""


class WorkerError(Exception):
    """A failure of a known kind."""

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


def as_worker_error(error: Exception) -> WorkerError:
    """Return an exception with its kind and its first line as the reason."""
    if isinstance(error, WorkerError):
        return error
    first = (str(error).splitlines() or [""])[0]
    kind: Kind = "out_of_memory" if _out_of_memory(error) else "crash"
    reason = f"{type(error).__name__}: {first}"
    if any(part in first for part in _WITHOUT_GPU):
        reason = f"this fork's fla needs a GPU, and this machine has none ({reason})"
    return WorkerError(reason, kind)
