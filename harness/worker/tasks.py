"""What a worker is asked to do: to check or time one tree, or to look at the machine."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from harness.measuring.job import Exit, Job, Reply
from harness.report import Telemetry
from harness.worker.failures import WorkerError, describe_failure
from harness.worker.turn import Turn

if TYPE_CHECKING:
    from harness.worker.referee import Remote


def _probe(job: Job, _subject: Remote | None) -> Mapping[str, Any]:
    from harness.worker.machine.environment import describe
    from harness.worker.referee import device_of

    return describe(device_of(job.device)).model_dump(mode="json")


def _call(job: Job, _subject: Remote | None) -> Mapping[str, Any]:
    module, _, name = job.function.partition(":")
    found = getattr(importlib.import_module(module), name)(*job.arguments)
    return found.model_dump(mode="json")  # type: ignore[no-any-return]


def _load(job: Job, subject: Remote | None) -> tuple[Remote, dict[str, Any]]:
    assert subject is not None  # noqa: S101 # see WITH_SUBJECT
    return subject, subject.ask("load", tree=job.tree)[0]


def _import(job: Job, subject: Remote | None) -> Mapping[str, Any]:
    return {"import_seconds": _load(job, subject)[1]["import_seconds"]}


def _gate(job: Job, subject: Remote | None) -> Mapping[str, Any]:
    import torch

    from harness.worker.gate import run_gate
    from harness.worker.referee import device_of

    remote, _ = _load(job, subject)
    device = device_of(job.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # small tensors: on a busy machine more threads only spin
    remote.ask("use", device=str(device), single=True)
    result = run_gate(remote, job.length, device, source_digest=job.source_digest)
    return result.model_dump(mode="json")


def _time(job: Job, subject: Remote | None) -> Mapping[str, Any]:
    turn = Turn(job.turn, job.seconds)
    from harness.worker.machine.environment import describe
    from harness.worker.machine.telemetry import Watch, snapshot
    from harness.worker.proof import RATIO, VERIFIED_OWN, take, verify
    from harness.worker.referee import device_of
    from harness.workload import WORKLOAD

    started_at = datetime.now(timezone.utc)
    remote, loaded = _load(job, subject)
    device = device_of(job.device)
    turn.wait()
    before = remote.ask("use", device=str(device), single=False)[0].get("gpu")
    with Watch(snapshot if device.type == "cuda" else None) as watch:
        timing, _ = remote.ask("time", length=job.length)
    used = turn.used - (time.monotonic() - float(timing["ended"]))
    elapsed = float(timing["elapsed_seconds"])
    if job.checked:
        per_call = elapsed / WORKLOAD.timed_calls
        enough = RATIO[device.type] * per_call
        proof = take(remote, job.length, device, enough=enough)
        remote.end()
        verify(proof, device, VERIFIED_OWN)
        proven = proof.seconds_per_call()
        if proven > enough:
            reason = (
                f"a call takes {proven * 1e3:.2f} ms where a timed one took {per_call * 1e3:.2f} ms"
            )
            raise WorkerError(f"the timed calls did not compute the layer: {reason}", "gate")
    remote.end()
    ended = float(timing["ended"])
    during = watch.between(ended - elapsed, ended)
    telemetry = None
    if before is not None and timing["gpu"] is not None:
        telemetry = Telemetry(before=before, during=during, after=timing["gpu"]).model_dump(
            mode="json"
        )
    tokens = WORKLOAD.batch_size * job.length * WORKLOAD.timed_calls
    return {
        "length": job.length,
        "tokens_per_sec": tokens / elapsed,
        "vram_mb": timing["vram_bytes"] / 2**20,
        "elapsed_seconds": elapsed,
        "host_seconds": timing["host_seconds"],
        "process_seconds": used,
        "call_seconds": timing["call_seconds"],
        "runs": WORKLOAD.timed_calls,
        "first_call_seconds": timing["first_call_seconds"],
        "import_seconds": loaded["import_seconds"],
        "source_file": loaded["operator_file"],
        "layer_file": loaded["layer_file"],
        "source_digest": job.source_digest,
        "telemetry": telemetry,
        "environment": describe(device).model_dump(mode="json"),
        "started_at": started_at.isoformat(),
    }


def _prove(job: Job, subject: Remote | None) -> Mapping[str, Any]:
    from harness.worker.machine.environment import describe
    from harness.worker.proof import take, time_link, verify
    from harness.worker.referee import device_of
    from harness.workload import WORKLOAD

    started_at, device = datetime.now(timezone.utc), device_of(job.device)
    link_seconds = time_link(job.length, device)
    remote, loaded = _load(job, subject)
    remote.ask("use", device=str(device), single=False)
    proof = take(remote, job.length, device)
    remote.end()
    verify(proof, device)
    calls, per_call = len(proof.row.digests), proof.seconds_per_call(link_seconds)
    return {
        "length": job.length,
        "tokens_per_sec": WORKLOAD.batch_size * job.length / per_call,
        "vram_mb": proof.vram_bytes / 2**20,
        "elapsed_seconds": calls * per_call,
        "runs": calls,
        "first_call_seconds": proof.first_call_seconds,
        "import_seconds": loaded["import_seconds"],
        "source_file": loaded["operator_file"],
        "layer_file": loaded["layer_file"],
        "source_digest": job.source_digest,
        "environment": describe(device).model_dump(mode="json"),
        "started_at": started_at.isoformat(),
    }


_TASKS = {
    "probe": _probe,
    "import": _import,
    "gate": _gate,
    "time": _time,
    "prove": _prove,
    "call": _call,
}
WITH_SUBJECT = frozenset({"import", "gate", "time", "prove"})
"""The tasks that need the code under test."""

_STATUS = {"gate": Exit.GATE, "import": Exit.IMPORT, "out_of_memory": Exit.OUT_OF_MEMORY}


def perform(job: Job, subject: Remote | None) -> tuple[Reply, Exit]:
    """Do the job and return the reply with the status to exit with.

    Args:
        subject: the process for the code under test; None for a task that has no tree.
    """
    try:
        body = _TASKS[job.task](job, subject)
        return Reply(nonce=job.nonce, body=dict(body)), Exit.DONE
    except Exception as error:  # whatever it is, the runner is told
        if not isinstance(error, WorkerError):
            traceback.print_exc()
        told = describe_failure(error)
        reply = Reply(
            nonce=job.nonce, failure=told["kind"], reason=told["reason"], remedy=told["remedy"]
        )
        return reply, _STATUS.get(told["kind"], Exit.CRASH)
