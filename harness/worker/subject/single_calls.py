"""Single calls after the validator's loop, timed by CUDA events with a cold L2 cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CALLS = 10

HEAD_START = 3_000_000
"""GPU clock cycles of sleep before a call, in which the host queues the call's kernels."""


def cold_calls(layer: Any, x: Tensor, calls: int = CALLS) -> tuple[float, ...]:
    """Return the GPU's seconds for each call, under bf16 autocast with gradients recorded.

    Before each call, writing four times the L2 cache's size evicts the data of the previous call.
    The GPU sleeps until the host has queued the call, so launch overhead does not count.

    Returns:
        The seconds; empty if there is not enough memory for the writes.

    Args:
        layer: returns a tuple whose first item is the output.
        x: on a CUDA device.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    size = 4 * torch.cuda.get_device_properties(x.device).L2_cache_size
    seconds = []
    try:
        flushed = torch.empty(size, dtype=torch.int8, device=x.device)
        for _ in range(calls):
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
