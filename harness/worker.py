"""The child process: checks or times one tree and answers on a private descriptor.

Only what is sent there counts; stdout and stderr belong to the code under test. This is where
torch is imported, after the process has tied its life to its parent's.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from harness.imports import explain_import
from harness.job import Exit, Job, Reply
from harness.process import die_with_parent
from harness.report import Kind

_ONLY_FROM_TREE = ("fla.ops.quasar", "fla.layers.quasar")


class WorkerError(Exception):
    """A failure whose kind is known."""

    def __init__(self, reason: str, kind: Kind, remedy: str = "") -> None:
        super().__init__(reason)
        self.kind: Kind = kind
        self.remedy = remedy


@dataclass(frozen=True)
class Loaded:
    """The code under test, and the files that it was loaded from, relative to the tree."""

    operator: Any
    layer_class: Any
    operator_file: str
    layer_file: str
    import_seconds: float


def load_tree(tree: Path) -> Loaded:
    """Import the layer and the operator with `tree` first on the path, as a validator does.

    Raises:
        WorkerError: they were loaded from somewhere else, or this Python lacks what they import.
    """
    sys.path.insert(0, str(tree))
    started = time.monotonic()
    try:
        layer = importlib.import_module("fla.layers.quasar")
        import_seconds = time.monotonic() - started
        operator = importlib.import_module("fla.ops.quasar.chunk")
    except ImportError as error:
        explained = explain_import(error, tree)
        if explained is None:
            raise
        reason, remedy = explained
        raise WorkerError(reason, "import", remedy) from error
    for name, module in list(sys.modules.items()):
        if any(name == own or name.startswith(f"{own}.") for own in _ONLY_FROM_TREE):
            origin = getattr(module, "__file__", None)
            if origin is None or not Path(origin).resolve().is_relative_to(tree):
                raise WorkerError(f"{name} was loaded from {origin}, not from {tree}", "gate")
    return Loaded(
        operator=operator.chunk_quasar,
        layer_class=layer.QuasarAttention,
        operator_file=_relative(operator, tree),
        layer_file=_relative(layer, tree),
        import_seconds=import_seconds,
    )


def _relative(module: ModuleType, tree: Path) -> str:
    return Path(str(module.__file__)).resolve().relative_to(tree).as_posix()


def _device(asked: str) -> Any:
    import torch

    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise WorkerError("no CUDA device is visible to torch; use --device cpu", "crash")
    return torch.device("cuda" if available and asked != "cpu" else "cpu")


def _probe(job: Job) -> Mapping[str, Any]:
    from harness.environment import describe

    return describe(_device(job.device)).model_dump(mode="json")


def _call(job: Job) -> Mapping[str, Any]:
    module, _, name = job.function.partition(":")
    found = getattr(importlib.import_module(module), name)(*job.arguments)
    return found.model_dump(mode="json")  # type: ignore[no-any-return]


def _import(job: Job) -> Mapping[str, Any]:
    return {"import_seconds": load_tree(Path(job.tree or "")).import_seconds}


def _gate(job: Job) -> Mapping[str, Any]:
    import torch

    from harness.gate import run_gate  # remembers the true clock before the tree comes in

    loaded = load_tree(Path(job.tree or ""))
    device = _device(job.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # small tensors: on a busy machine more threads only spin
    result = run_gate(
        loaded.operator, loaded.layer_class, job.length, device, source_digest=job.source_digest
    )
    return result.model_dump(mode="json")


def beside_others(turn: str | None) -> Callable[[], None]:
    """Share a lock on the file `turn`; return a call that waits until no other process has it.

    It then stays with this process to its end. None is a process that has nobody to wait for.
    """
    if turn is None:
        return lambda: None
    lock = os.open(turn, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lambda: fcntl.flock(lock, fcntl.LOCK_EX)


def _time(job: Job) -> Mapping[str, Any]:
    wait_until_alone = beside_others(job.turn)
    from harness.environment import describe
    from harness.gate import inspect_timed
    from harness.telemetry import snapshot
    from harness.timing import InvalidRunError, time_layer
    from harness.workload import WORKLOAD

    before = None if job.device == "cpu" else snapshot()
    started_at = datetime.now(timezone.utc)
    loaded = load_tree(Path(job.tree or ""))
    device = _device(job.device)
    wait_until_alone()
    try:
        timing = time_layer(
            loaded.layer_class, job.length, device, inspect=inspect_timed if job.checked else None
        )
    except InvalidRunError as error:
        raise WorkerError(str(error), "gate") from error
    telemetry = None
    if before is not None and timing.gpu is not None:
        telemetry = {
            name: state.model_dump(mode="json")
            for name, state in (("before", before), ("after", timing.gpu))
        }
    tokens = WORKLOAD.batch_size * job.length * WORKLOAD.timed_calls
    return {
        "length": job.length,
        "tokens_per_sec": tokens / timing.elapsed_seconds,
        "vram_mb": timing.vram_bytes / 2**20,
        "elapsed_seconds": timing.elapsed_seconds,
        "runs": WORKLOAD.timed_calls,
        "first_call_seconds": timing.first_call_seconds,
        "import_seconds": loaded.import_seconds,
        "source_file": loaded.operator_file,
        "layer_file": loaded.layer_file,
        "source_digest": job.source_digest,
        "telemetry": telemetry,
        "environment": describe(device).model_dump(mode="json"),
        "started_at": started_at.isoformat(),
    }


_TASKS = {
    "probe": _probe,
    "import": _import,
    "gate": _gate,
    "time": _time,
    "call": _call,
}
_STATUS = {"gate": Exit.GATE, "import": Exit.IMPORT}


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text
        or "can't allocate memory" in text
        or "cublas_status_alloc_failed" in text  # cuBLAS's own words for it
    )


def perform(job: Job) -> tuple[Reply, Exit]:
    """Do the job and return the reply with the status to exit with."""
    try:
        body = _TASKS[job.task](job)
        return Reply(nonce=job.nonce, body=dict(body)), Exit.DONE
    except WorkerError as error:
        reply = Reply(nonce=job.nonce, failure=error.kind, reason=str(error), remedy=error.remedy)
        return reply, _STATUS.get(error.kind, Exit.CRASH)
    except Exception as error:  # the code under test may raise anything
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"
        if _out_of_memory(error):
            reply = Reply(nonce=job.nonce, failure="out_of_memory", reason=reason)
            return reply, Exit.OUT_OF_MEMORY
        return Reply(nonce=job.nonce, failure="crash", reason=reason), Exit.CRASH


def main() -> int:
    """Read a job from stdin, do it, send the reply."""
    die_with_parent()
    try:
        job = Job.model_validate_json(sys.stdin.buffer.read())
    except ValidationError as error:
        sys.stderr.write(f"harness.worker takes a job on stdin: {error}\n")
        return Exit.BAD_JOB
    if os.getppid() != job.parent:
        return Exit.PARENT_GONE  # it died before the kernel was asked
    os.set_inheritable(job.result_fd, False)
    reply, status = perform(job)
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(job.result_fd, "wb") as channel:
        channel.write(json.dumps(reply.model_dump(mode="json"), allow_nan=False).encode() + b"\n")
    # Not through exit handlers: a crash while CUDA is torn down would say nothing about the run.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
