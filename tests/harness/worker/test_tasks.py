"""What a worker sends where there is a GPU, with the GPU's figures put in by hand."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from harness.job import Exit, Job
from harness.report import Measurement, Snapshot
from harness.worker import environment, tasks, telemetry, timing
from harness.worker.tree import Loaded
from tests.harness import honest, samples


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (RuntimeError("CUDA error: out of memory"), "out_of_memory", Exit.OUT_OF_MEMORY),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            "out_of_memory",
            Exit.OUT_OF_MEMORY,
        ),
        (MemoryError(), "out_of_memory", Exit.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: an illegal memory access"), "crash", Exit.CRASH),
        (ValueError("out of memory, says the code under test"), "crash", Exit.CRASH),
    ],
)
def test_row_22_only_a_lack_of_memory_counts_as_one(
    error: Exception, kind: str, status: Exit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tree: object) -> Loaded:
        raise error

    monkeypatch.setattr(tasks, "load_tree", fail)
    job = Job(task="time", tree="/t", device="cpu", result_fd=9, nonce="n", parent=1)
    reply, ended = tasks.perform(job)
    assert (reply.failure, ended) == (kind, status)


def test_a_gpus_state_travels_with_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Snapshot(sm_clock_mhz=1755, slowdowns=("power cap", "hardware slowdown"))
    loaded = Loaded(None, honest.QuasarAttention, "a.py", "b.py", 1.0)

    def timed(*_arguments: Any, **_options: Any) -> timing.Timing:
        return timing.Timing(
            *(0.5, 2.0, 3 << 20, state),
            host_seconds=0.1,
            ended=time.monotonic(),
            call_seconds=(0.04, 0.05),
        )

    monkeypatch.setattr(tasks, "load_tree", lambda tree: loaded)
    monkeypatch.setattr(telemetry, "snapshot", lambda: state)
    monkeypatch.setattr(tasks, "_device", lambda asked: torch.device("cuda"))
    monkeypatch.setattr(environment, "describe", lambda device: samples.environment())
    monkeypatch.setattr(timing, "time_layer", timed)
    job = Job(task="time", tree="/t", length=100, result_fd=9, nonce="n", parent=1)
    reply, status = tasks.perform(job)
    assert (status, reply.failure) == (Exit.DONE, None), reply.reason
    found = Measurement.model_validate({**(reply.body or {}), "gate": None, "cache": "shared"})
    assert found.telemetry is not None
    assert found.telemetry.before == found.telemetry.after == state
    assert (found.tokens_per_sec, found.vram_mb) == (10 * 100 / 0.5, 3)
    assert (found.host_seconds, found.call_seconds) == (0.1, (0.04, 0.05))
    assert 0 < (found.process_seconds or 0) < time.clock_gettime(time.CLOCK_BOOTTIME)
