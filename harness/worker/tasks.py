"""The tasks of a worker: to check or time one tree, or to describe the machine."""

from __future__ import annotations

import importlib
import json
import os
import time
import traceback
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from harness.hardware.machine import Telemetry
from harness.measuring.job import Exit, Job, Reply
from harness.sample import Sample
from harness.terminal import one_line
from harness.worker.failures import WorkerError, as_worker_error
from harness.worker.gpu_lock import GpuLock

if TYPE_CHECKING:
    import torch

    from harness.worker.channel import SubjectProxy
    from harness.worker.subject.tree import Imported


Model = TypeVar("Model", bound=BaseModel)

REASON_LETTERS = 2000


def _probe(job: Job, _subject: SubjectProxy | None) -> BaseModel:
    from harness.worker.machine.environment import describe, device_of

    return describe(device_of(job.device))


def _call(job: Job, _subject: SubjectProxy | None) -> BaseModel:
    module, _, name = job.function.partition(":")
    result: BaseModel = getattr(importlib.import_module(module), name)(*job.arguments)
    return result


def _load(job: Job, subject: SubjectProxy | None) -> tuple[SubjectProxy, Imported]:
    from harness.worker.subject.tree import Imported

    assert subject is not None  # noqa: S101 # see WITH_SUBJECT
    return subject, _answer(Imported, subject.ask("load", tree=job.tree)[0])


def _import(job: Job, subject: SubjectProxy | None) -> BaseModel:
    return _load(job, subject)[1]


def _check(job: Job, subject: SubjectProxy | None) -> BaseModel:
    import torch

    from harness.worker.correctness import check_correctness
    from harness.worker.machine.environment import device_of

    device = device_of(job.device)  # before the code under test is loaded, which could hide the GPU
    proxy, _ = _load(job, subject)
    if device.type == "cpu":
        torch.set_num_threads(1)  # on a busy machine, threads wait for one another
    proxy.ask("use", device=str(device), single=True)
    return check_correctness(
        proxy, job.length, device, source_digest=job.source_digest, own=job.own
    )


def _time(job: Job, subject: SubjectProxy | None) -> BaseModel:
    lock = GpuLock(job.gpu_lock, job.seconds)
    from harness.worker.machine.environment import device_of
    from harness.worker.machine.telemetry import Watch, snapshot
    from harness.worker.proof import cross_check
    from harness.worker.subject.timing import LoopResult
    from harness.workload import WORKLOAD

    started_at = datetime.now(timezone.utc)
    proxy, imported = _load(job, subject)
    device = device_of(job.device)
    lock.take()
    before = proxy.ask("use", device=str(device), single=False)[0].get("gpu")
    with Watch(snapshot if device.type == "cuda" else None) as watch:
        loop = _answer(LoopResult, proxy.ask("time", length=job.length)[0])
    used = lock.used - (time.monotonic() - loop.ended)
    if job.cross_check:
        cross_check(proxy, job.length, device, loop.elapsed_seconds / WORKLOAD.timed_calls)
    proxy.end()
    during = watch.between(loop.ended - loop.elapsed_seconds, loop.ended)
    telemetry = None
    if before is not None and loop.gpu is not None:
        telemetry = Telemetry(before=before, during=during, after=loop.gpu)
    tokens = WORKLOAD.batch_size * job.length * WORKLOAD.timed_calls
    return _sample(
        job,
        imported,
        device,
        started_at,
        tokens_per_sec=tokens / loop.elapsed_seconds,
        vram_mb=loop.vram_bytes / 2**20,
        elapsed_seconds=loop.elapsed_seconds,
        host_seconds=loop.host_seconds,
        process_seconds=used,
        call_seconds=loop.call_seconds,
        runs=WORKLOAD.timed_calls,
        first_call_seconds=loop.first_call_seconds,
        telemetry=telemetry,
    )


def _prove(job: Job, subject: SubjectProxy | None) -> BaseModel:
    from harness.worker.machine.environment import device_of
    from harness.worker.proof import take, time_link, verify
    from harness.workload import WORKLOAD

    started_at, device = datetime.now(timezone.utc), device_of(job.device)
    link_seconds = time_link(job.length, device)
    proxy, imported = _load(job, subject)
    proxy.ask("use", device=str(device), single=False)
    proof = take(proxy, job.length, device)
    proxy.end()
    verify(proof, device)
    calls, per_call = len(proof.chain.digests), proof.seconds_per_call(link_seconds)
    return _sample(
        job,
        imported,
        device,
        started_at,
        tokens_per_sec=WORKLOAD.batch_size * job.length / per_call,
        vram_mb=proof.vram_bytes / 2**20,
        elapsed_seconds=calls * per_call,
        runs=calls,
        first_call_seconds=proof.first_call_seconds,
    )


def _sample(
    job: Job, imported: Imported, device: torch.device, started_at: datetime, **figures: Any
) -> Sample:
    from harness.worker.machine.environment import describe

    return Sample(
        length=job.length,
        import_seconds=imported.import_seconds,
        cache=job.cache,
        source_file=imported.operator_file,
        layer_file=imported.layer_file,
        source_digest=job.source_digest,
        environment=describe(device),
        started_at=started_at,
        **figures,
    )


def _answer(model: type[Model], body: dict[str, Any]) -> Model:
    """Return the subject's reply as a model; raise a WorkerError if it does not fit."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise WorkerError("the subject's answer is malformed", "protocol") from error


_TASKS = {
    "probe": _probe,
    "import": _import,
    "check": _check,
    "time": _time,
    "prove": _prove,
    "call": _call,
}
WITH_SUBJECT = frozenset({"import", "check", "time", "prove"})
"""The tasks that need the code under test."""


def answer(job: Job, subject: SubjectProxy | None) -> Exit:
    """Do the job and write the reply to its descriptor; return the status to exit with."""
    reply, status = perform(job, subject)
    with os.fdopen(job.result_fd, "wb") as channel:
        channel.write(json.dumps(reply.model_dump(mode="json"), allow_nan=False).encode() + b"\n")
    return status


def perform(job: Job, subject: SubjectProxy | None) -> tuple[Reply, Exit]:
    """Do the job, with the subject if the job has a tree; return the reply and the exit status."""
    try:
        body = _TASKS[job.task](job, subject).model_dump(mode="json")
        return Reply(nonce=job.nonce, body=body), Exit.DONE
    except Exception as error:  # the runner must get a reply in any case
        if not isinstance(error, WorkerError):
            traceback.print_exc()
        failure = as_worker_error(error)
        # the text may have names that are not UTF-8, which would spoil the reply, or huge shapes
        reason = one_line(str(failure)[:REASON_LETTERS])
        reply = Reply(nonce=job.nonce, failure=failure.kind, reason=reason)
        return reply, Exit.CRASH
