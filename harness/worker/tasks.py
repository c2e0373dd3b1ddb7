"""What a worker is asked to do: to check or time one tree, or to look at the machine."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.job import Exit, Job, Reply
from harness.report import Telemetry
from harness.worker.tree import WorkerError, load_tree
from harness.worker.turn import Turn


def _device(asked: str) -> Any:
    import torch

    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise WorkerError("no CUDA device is visible to torch; use --device cpu", "crash")
    return torch.device("cuda" if available and asked != "cpu" else "cpu")


def _probe(job: Job) -> Mapping[str, Any]:
    from harness.worker.environment import describe

    return describe(_device(job.device)).model_dump(mode="json")


def _call(job: Job) -> Mapping[str, Any]:
    module, _, name = job.function.partition(":")
    found = getattr(importlib.import_module(module), name)(*job.arguments)
    return found.model_dump(mode="json")  # type: ignore[no-any-return]


def _import(job: Job) -> Mapping[str, Any]:
    return {"import_seconds": load_tree(Path(job.tree or "")).import_seconds}


def _gate(job: Job) -> Mapping[str, Any]:
    import torch

    from harness.worker.gate import run_gate  # remembers the true clock before the tree comes in

    loaded = load_tree(Path(job.tree or ""))
    device = _device(job.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # small tensors: on a busy machine more threads only spin
    result = run_gate(
        loaded.operator, loaded.layer_class, job.length, device, source_digest=job.source_digest
    )
    return result.model_dump(mode="json")


def _time(job: Job) -> Mapping[str, Any]:
    turn = Turn(job.turn, job.seconds)
    from harness.worker.environment import describe
    from harness.worker.gate import inspect_timed
    from harness.worker.telemetry import quiet_snapshot
    from harness.worker.timing import InvalidRunError, time_layer
    from harness.workload import WORKLOAD

    started_at = datetime.now(timezone.utc)
    loaded = load_tree(Path(job.tree or ""))
    device = _device(job.device)
    turn.wait()
    before = None if device.type == "cpu" else quiet_snapshot()
    try:
        timing = time_layer(
            loaded.layer_class, job.length, device, inspect=inspect_timed if job.checked else None
        )
    except InvalidRunError as error:
        raise WorkerError(str(error), "gate") from error
    used = turn.used
    telemetry = None
    if before is not None and timing.gpu is not None:
        telemetry = Telemetry(before=before, after=timing.gpu).model_dump(mode="json")
    tokens = WORKLOAD.batch_size * job.length * WORKLOAD.timed_calls
    return {
        "length": job.length,
        "tokens_per_sec": tokens / timing.elapsed_seconds,
        "vram_mb": timing.vram_bytes / 2**20,
        "elapsed_seconds": timing.elapsed_seconds,
        "host_seconds": timing.host_seconds,
        "process_seconds": used - (time.monotonic() - timing.ended),
        "call_seconds": list(timing.call_seconds),
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


_TASKS = {"probe": _probe, "import": _import, "gate": _gate, "time": _time, "call": _call}
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
