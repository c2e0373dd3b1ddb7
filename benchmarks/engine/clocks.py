"""How long calls take on this GPU, how fast it copies and multiplies, and its memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from harness.tuning.clock import Call, replayed, steady
from harness.tuning.clock import graph_ms as graph_ms
from harness.tuning.clock import poison as poison
from harness.tuning.clock import soak as soak

ROTATED_BYTES = 256 << 20
"""States taken in turn when decoding: far more than an L2 cache holds, where 64 sets suffice."""


def free() -> None:
    """Give the allocator's memory back and forget its peak; without a GPU there is none."""
    gc.collect()
    if not torch.cuda.is_available():
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def graph_bytes() -> int:
    """Bytes that CUDA graphs hold for themselves beside what counts as allocated."""
    snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    pools = [s for s in snapshot if s["segment_pool_id"] != (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in pools)


def free_workspaces() -> int:
    """Give cuBLAS's workspaces back, those of CUDA graphs to their pool; return their bytes."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def product_tflops(dtype: torch.dtype, size: int = 8192) -> float:
    """Rate of a product of two `size` x `size` matrices of noise, TFLOP/s."""
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    return 2 * size**3 / graph_ms(lambda: torch.mm(a, b)) / 1e9


def rested_ms(call: Call, repeats: int = 5, rest: float = 0.3) -> float:
    """Median time of one call, in milliseconds, when a CUDA graph replays it as validators do.

    After `rest` seconds without work three replays warm up, then ten are timed: the clocks have not
    come down yet to what the power limit leaves of them.
    """
    times = []
    with replayed([call]) as replay:
        for _ in range(repeats):
            torch.cuda.synchronize()
            time.sleep(rest)
            replay(3)
            times.append(replay(10))
    return median(times)


def eager_ms(
    calls: Call | Sequence[Call], repeats: int = 11, warm: float = 0.2, least_ms: float = 10
) -> float:
    """Median time of one call, in milliseconds: the host's clock from synchronize to synchronize.

    Calls follow one another for about `least_ms`, as in a loop over layers or tokens, after `warm`
    seconds of the same.
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

    return steady(loop, least_ms, repeats, warm) / len(calls)


def states_in_turn(nbytes: int) -> int:
    """Return how many copies of a state are taken in turn so that no L2 cache serves them."""
    return max(4, min(64, ROTATED_BYTES // nbytes))


def copy_ms(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """Time copies, of one pair after the other, by the driver and by a kernel: the faster."""
    pairs = list(zip(sources, targets, strict=True))
    by_driver = [partial(target.copy_, source) for source, target in pairs]
    by_kernel = [partial(torch.neg, source, out=target) for source, target in pairs]
    return min(graph_ms(by_driver), graph_ms(by_kernel))


def copy_bandwidth() -> float:
    """Return the bandwidth of a large device copy, GB/s, both directions counted."""
    source = torch.empty(1 << 28, device="cuda")
    return 2 * 4 * source.numel() / copy_ms([source], [torch.empty_like(source)]) / 1e6
