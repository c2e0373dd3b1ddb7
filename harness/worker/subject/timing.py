"""The validator's loop, call for call, single calls after it, and guards against a patched clock.

This module is imported before any code under test, so that it stores the original functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from pydantic import Field, FiniteFloat

from harness.hardware.machine import Frozen, NotNegative, Positive, Snapshot
from harness.worker.failures import WorkerError
from harness.worker.machine.telemetry import snapshot
from harness.workload import WORKLOAD

_GUARDED: tuple[tuple[Any, str], ...] = (
    (time, "time"),
    (time, "perf_counter"),
    (time, "monotonic"),
    (torch, "randn"),
    (torch, "autocast"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "max_memory_allocated"),
    (torch.cuda, "reset_peak_memory_stats"),
)
_TRUE = tuple(getattr(owner, name) for owner, name in _GUARDED)
_monotonic = time.monotonic

Inspect = Callable[[Any, torch.Tensor, torch.Tensor], None]

CLOCK_TOLERANCE = 0.02
"""Relative difference allowed between the validator's clock and the monotonic one."""

COLD_CALLS, HEAD_START = 10, 3_000_000
"""Number of single calls, and the clocks that the GPU sleeps before each. By the end of the sleep
the host has queued the call."""


class LoopResult(Frozen):
    """The subject's report of one run of the loop; the referee does not trust it."""

    elapsed_seconds: Positive
    first_call_seconds: NotNegative
    vram_bytes: int = Field(ge=0)
    host_seconds: NotNegative | None = Field(
        default=None, description="until the last call had returned"
    )
    call_seconds: tuple[Positive, ...] = Field(default=(), description="single calls afterwards")
    ended: FiniteFloat = Field(description="when the loop had ended, on the monotonic clock")
    gpu: Snapshot | None = Field(description="its state right after the loop")


def tampered() -> list[str]:
    """Return the names of guarded functions that are no longer the original ones."""
    return [
        f"{owner.__name__}.{name}"
        for (owner, name), true in zip(_GUARDED, _TRUE, strict=True)
        if getattr(owner, name) is not true
    ]


def recording(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of one call: bf16 autocast on CUDA, `no_grad` on a CPU."""
    if device.type == "cuda":
        return torch.autocast(device_type="cuda", dtype=torch.bfloat16)
    return torch.no_grad()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; on a CPU this does nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_layer(
    layer_class: Any,
    length: int,
    device: torch.device,
    *,
    inspect: Inspect | None = None,
) -> LoopResult:
    """Build the layer and run the loop: warm-ups, then timed calls between two synchronizes.

    The previous output, and with it its autograd graph, stays alive during each call, as in the
    validator's script: peak memory depends on it. `inspect(layer, x, output)` is called with the
    last timed output after the clock has stopped. Raises a WorkerError if a guarded function was
    replaced, or the clocks disagree.
    """
    _require_original()  # before minutes of calls with a time that cannot be trusted
    layer = layer_class(**WORKLOAD.layer_arguments()).to(device)
    x = torch.randn(WORKLOAD.batch_size, length, WORKLOAD.hidden_size, device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    called = _monotonic()
    for call in range(WORKLOAD.warmup_calls):
        with recording(device):
            _ = layer(x)
        if call == 0:
            synchronize(device)
            first_call = _monotonic() - called
    synchronize(device)

    outer = _monotonic()
    start = time.time()
    inner = _monotonic()
    for _call in range(WORKLOAD.timed_calls):
        with recording(device):
            _ = layer(x)
    host = _monotonic() - inner
    synchronize(device)
    inner = _monotonic() - inner
    elapsed = time.time() - start
    ended = _monotonic()
    outer = ended - outer

    vram = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    state = snapshot() if device.type == "cuda" else None
    _require_honest(inner, elapsed, outer)
    if inspect is not None:
        inspect(layer, x, _[0].detach())
    on_gpu = device.type == "cuda"
    return LoopResult(
        elapsed_seconds=elapsed,
        first_call_seconds=first_call,
        vram_bytes=vram,
        host_seconds=host if on_gpu else None,
        call_seconds=cold_calls(layer, x) if on_gpu else (),
        ended=ended,
        gpu=state,
    )


def _require_original() -> None:
    """Raise if a guarded function was replaced."""
    replaced = tampered()
    if replaced:
        raise WorkerError(f"the code under test replaced {', '.join(replaced)}", "gate")


def _require_honest(inner: float, elapsed: float, outer: float) -> None:
    """Raise if a guarded function was replaced, or the system and monotonic clocks disagree."""
    _require_original()
    if not inner * (1 - CLOCK_TOLERANCE) <= elapsed <= outer * (1 + CLOCK_TOLERANCE):
        # a temporary fault: NTP may step the clock
        raise WorkerError(
            f"the system clock counted {elapsed:.6f} s where {inner:.6f} s passed; "
            "was it set during the run?",
            "crash",
        )


def cold_calls(layer: Any, x: torch.Tensor) -> tuple[float, ...]:
    """Return the GPU seconds of each of COLD_CALLS forward passes under bf16 autocast.

    Before each call, memory of four times the size of the L2 cache is written, so that the cache
    has no data of the previous call. The GPU sleeps while the host queues the call, so that waits
    for the host do not count. The result is empty if there is too little memory.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    size = 4 * torch.cuda.get_device_properties(x.device).L2_cache_size
    seconds = []
    try:
        flushed = torch.empty(size, dtype=torch.int8, device=x.device)
        for _ in range(COLD_CALLS):
            flushed.zero_()
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
            start.record()
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                _output = layer(x)
            stop.record()
            stop.synchronize()
            seconds.append(start.elapsed_time(stop) / 1e3)
    except torch.OutOfMemoryError:
        return ()
    return tuple(seconds)
