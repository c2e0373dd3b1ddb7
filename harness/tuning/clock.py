"""Times of calls on a GPU, by replays of a CUDA graph at the clocks of sustained work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch

Call = Callable[[], object]


def poison() -> None:
    """Fill the allocator's free blocks with NaN, so that unwritten outputs are NaN."""
    if not torch.cuda.is_available():
        return
    free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    junk = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 12, 1 << 18, free // 8)]
    del junk


def soak(seconds: float = 0.3) -> None:
    """Keep the GPU busy, so that its clocks are those of sustained work."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for _ in range(8):
            torch.mm(x, x)
        torch.cuda.synchronize()


def graph_ms(calls: Call | Sequence[Call], repeats: int = 11, warm: float = 0.2) -> float:
    """Return the median milliseconds of one call in a CUDA graph of all `calls`.

    Each of the `repeats` timings takes about three milliseconds of consecutive replays. Before the
    first one, `warm` seconds of replays bring the clocks to those of this work.
    """
    calls = calls if isinstance(calls, Sequence) else (calls,)
    with replayed(calls) as replay:
        return steady(replay, 3, repeats, warm) / len(calls)


@contextmanager
def replayed(calls: Sequence[Call]) -> Iterator[Callable[[int], float]]:
    """Capture all calls; yield `replay(times)`, which returns the milliseconds of one replay."""
    for _ in range(2):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay(times: int) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(times):
            graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / times

    yield replay
    graph.reset()


def steady(run: Callable[[int], float], least_ms: float, repeats: int, warm: float) -> float:
    """Return the median of `run(times)`, milliseconds per run, after `warm` seconds of runs."""
    run(2)
    once = run(3)
    times = max(1, round(least_ms / once))
    run(max(1, round(warm * 1e3 / once)))
    return median(run(times) for _ in range(repeats))
