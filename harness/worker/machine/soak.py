"""Heat soak: keeps a GPU busy until its temperature is that of sustained work."""

from __future__ import annotations

import time

import torch

from harness.hardware.machine import Frozen
from harness.worker.machine.telemetry import snapshot

LOOK_SECONDS = 2.0
STEADY_C = 1
"""A temperature that rises by fewer degrees Celsius in LOOK_SECONDS is steady."""


class Soak(Frozen):
    """Seconds of a GPU's heat soak, and its temperature in Celsius before and after."""

    seconds: float
    before_c: int | None
    after_c: int | None


def soak(max_seconds: float) -> Soak:
    """Keep the GPU busy until its temperature is steady, or for `max_seconds`.

    On a cold GPU the clocks are higher than on a validator's busy one.
    """
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    began = time.monotonic()
    before = last = _temperature()
    while True:
        until = min(began + max_seconds, time.monotonic() + LOOK_SECONDS)
        while time.monotonic() < until:
            for _ in range(20):
                torch.mm(x, x)
            torch.cuda.synchronize()
        now = _temperature()
        steady = now is not None and last is not None and now - last < STEADY_C
        if steady or time.monotonic() >= began + max_seconds:
            return Soak(seconds=time.monotonic() - began, before_c=before, after_c=now)
        last = now


def _temperature() -> int | None:
    state = snapshot()
    return None if state is None else state.temperature_c
