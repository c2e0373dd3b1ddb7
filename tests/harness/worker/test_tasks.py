"""The replies of a worker, with a fake subject and fake figures of a GPU."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
import torch

from harness.hardware.machine import Snapshot
from harness.measuring.job import Exit, Job
from harness.sample import Sample
from harness.worker import tasks
from harness.worker.failures import WorkerError
from harness.worker.machine import environment
from tests.harness import samples

JOB: dict[str, Any] = {"result_fd": 9, "nonce": "n", "parent": 1}


class Answers:
    """A subject with prepared answers; an answer that is an exception is raised."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def ask(self, op: str, _tensors: object = None, **_fields: Any) -> tuple[dict[str, Any], Any]:
        answer = self.answers.get(op, {})
        if isinstance(answer, Exception):
            raise answer
        return answer, {}

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), "out_of_memory"),
        (torch.OutOfMemoryError("tried to allocate 2 GiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("CUDA error: an illegal memory access"), "crash"),
        (ValueError("out of memory"), "crash"),
    ],
)
def test_row_22_only_a_lack_of_memory_is_reported_as_one(error: Exception, kind: str) -> None:
    job = Job(task="time", tree="/t", device="cpu", **JOB)
    reply, ended = tasks.perform(job, cast(Any, Answers(load=error)))
    assert reply.failure == kind
    assert ended == Exit.CRASH


@pytest.mark.parametrize("task", ["check", "prove"])
def test_the_device_is_chosen_before_untrusted_code_is_loaded(task, monkeypatch):
    """Otherwise the code could hide the GPU, so that its CPU functions are checked."""

    def no_device(_name: str) -> torch.device:
        raise WorkerError("no device", "crash")

    monkeypatch.setattr(environment, "device_of", no_device)
    job = Job(task=task, tree="/t", **JOB)
    reply, _ = tasks.perform(job, cast(Any, Answers(load=ValueError("loaded"))))
    assert reply.reason == "no device"


def test_a_sample_contains_the_gpus_state(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Snapshot(sm_clock_mhz=1755, slowdowns=("power cap", "hardware slowdown"))
    loaded = {"import_seconds": 1.0, "operator_file": "a.py", "layer_file": "b.py"}
    gpu = state.model_dump(mode="json")
    figures = {"elapsed_seconds": 0.5, "first_call_seconds": 2.0, "vram_bytes": 3 << 20}
    others = {"host_seconds": 0.1, "ended": time.monotonic(), "call_seconds": [0.04, 0.05]}
    subject = Answers(load=loaded, use={"gpu": gpu}, time={**figures, **others, "gpu": gpu})
    monkeypatch.setattr(environment, "device_of", lambda name: torch.device("cuda"))
    monkeypatch.setattr(environment, "describe", lambda device: samples.environment())
    job = Job(task="time", tree="/t", length=100, cross_check=False, **JOB)
    reply, status = tasks.perform(job, cast(Any, subject))
    assert (status, reply.failure) == (Exit.DONE, None), reply.reason
    sample = Sample.model_validate(reply.body)
    assert sample.telemetry is not None
    assert sample.telemetry.before == sample.telemetry.after == state
    assert (sample.tokens_per_sec, sample.vram_mb) == (10 * 100 / 0.5, 3)
    assert (sample.host_seconds, sample.call_seconds) == (0.1, (0.04, 0.05))
    assert 0 < (sample.process_seconds or 0) < time.clock_gettime(time.CLOCK_BOOTTIME)
