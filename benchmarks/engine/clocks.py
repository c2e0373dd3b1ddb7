"""Times and memory of calls on this GPU, and the GPU's rates of copies and products."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

Call = Callable[[], object]

ROTATED_BYTES = 256 << 20
"""Total bytes of the 4 to 64 copies of a state that decoding uses in turn: more than any L2 cache
holds."""

CLOCKS = """\
The GPU is warmed with matrix products first, and each call runs for 0.2 s before it is timed. \
Graph: median of 11 runs of CUDA-graph replays without a gap. Eager: the host's clock between \
synchronizations around consecutive calls."""
RESTED = """\
From rest: 0.3 s without work, three replays, then ten that are timed, as validators time a layer, \
median of 5."""
"""The text for protocols with `rested_ms`; `CLOCKS` is that for `graph_ms` and `eager_ms`."""


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

    yield partial(events_ms, [graph.replay])
    graph.reset()


def steady(run: Callable[[int], float], least_ms: float, repeats: int, warm: float) -> float:
    """Return the median of `run(times)`, milliseconds per run, after `warm` seconds of runs."""
    run(2)
    once = run(3)
    times = max(1, round(least_ms / once))
    run(max(1, round(warm * 1e3 / once)))
    return median(run(times) for _ in range(repeats))


def free() -> None:
    """Collect garbage; on a GPU also release cached memory and reset the peak."""
    gc.collect()
    if not torch.cuda.is_available():
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def peak_bytes(call: Call) -> int:
    """Return a call's peak memory in addition to the memory before it; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def graph_bytes() -> int:
    """Return the bytes that CUDA graphs reserve in addition to allocated memory."""
    snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    pools = [s for s in snapshot if s["segment_pool_id"] != (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in pools)


def free_workspaces() -> int:
    """Free cuBLAS's workspaces, including those in CUDA graphs' pools; return their bytes."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def product_tflops(dtype: torch.dtype) -> float:
    """Return the rate of a product of two random 8192 x 8192 matrices, in TFLOP/s."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    return 2 * size**3 / graph_ms(lambda: torch.mm(a, b)) / 1e9


def rested_ms(call: Call) -> float:
    """Return the median milliseconds of one call in a CUDA graph on a rested GPU.

    After 0.3 s without work, three replays warm up and ten are timed. As in a validator's loop,
    they end before the power limit lowers the clocks.
    """
    times = []
    with replayed([call]) as replay:
        for _ in range(5):
            torch.cuda.synchronize()
            time.sleep(0.3)
            replay(3)
            times.append(replay(10))
    return median(times)


def eager_ms(calls: Call | Sequence[Call], least_ms: float = 10) -> float:
    """Return the median milliseconds of one launched call, by the host's clock.

    After a warm-up of 0.2 s, calls for about `least_ms` are launched between two synchronisations,
    as in a loop over layers or tokens.
    """
    calls = calls if isinstance(calls, Sequence) else (calls,)

    def loop(times: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            for call in calls:
                call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / times

    return steady(loop, least_ms, repeats=11, warm=0.2) / len(calls)


class Single(NamedTuple):
    """Median milliseconds of a call that begins and ends with an idle GPU, by the host's clock."""

    host: float  # until the call returned
    wall: float  # until its results


def single_ms(call: Call, times: int, warm: int) -> Single:
    """Time a call `times` times after `warm` calls, each from an idle GPU to an idle GPU."""
    host, wall = [], []
    for _ in range(warm + times):
        _synchronize()
        begin = time.perf_counter()
        results = call()
        host.append((time.perf_counter() - begin) * 1e3)
        _synchronize()
        wall.append((time.perf_counter() - begin) * 1e3)
        del results
    return Single(median(host[warm:]), median(wall[warm:]))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def events_ms(calls: Sequence[Call], times: int) -> float:
    """Return the mean milliseconds of a round of all calls, over `times` rounds, by CUDA events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        for call in calls:
            call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / times


def states_in_turn(nbytes: int) -> int:
    """Return the number of copies of a state that decoding uses in turn (`ROTATED_BYTES`)."""
    return max(4, min(64, ROTATED_BYTES // nbytes))


def copy_ms(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """Return the milliseconds of copying all pairs, by the faster of the driver and a kernel."""
    pairs = list(zip(sources, targets, strict=True))
    by_driver = [partial(target.copy_, source) for source, target in pairs]
    by_kernel = [partial(torch.neg, source, out=target) for source, target in pairs]
    return min(graph_ms(by_driver), graph_ms(by_kernel))


def copy_bandwidth() -> float:
    """Return the bandwidth of a large device copy in GB/s, as the sum of reads and writes."""
    source = torch.empty(1 << 28, device="cuda")
    return 2 * 4 * source.numel() / copy_ms([source], [torch.empty_like(source)]) / 1e6
