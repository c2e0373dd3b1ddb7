"""What the scripts that measure the operator share: inputs like a layer's, and clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS, WIDTH = 8, 64
NOISE = {"correlated 10%": 0.1, "correlated 1%": 0.01}
"""Kinds of keys that share one direction: the noise on the common key, by name."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Call = Callable[[], object]


def layer_like(tokens: int, batch: int = 1, heads: int = HEADS, width: int = WIDTH) -> Inputs:
    """q, k, v [B, T, H, S] bf16 as a layer with default weights makes them, and beta [H] fp32."""
    channels = heads * width

    def projected() -> Tensor:
        x = torch.randn(batch, tokens, channels, device="cuda") / 3**0.5
        taps = (torch.rand(channels, 1, 4, device="cuda") - 0.5) / 2**0.5
        y = F.conv1d(F.pad(x.mT, (3, 0)), taps, groups=channels).mT
        return F.silu(y).bfloat16().contiguous().view(batch, tokens, heads, width)

    q, k, v = projected(), projected(), projected()
    return q, k, v, F.softplus(torch.empty(heads, device="cuda").uniform_(1, 16).log())


def correlated(inputs: Inputs, noise: float) -> Inputs:
    """Replace the keys by one common vector a head, `noise` times as much noise added."""
    q, k, v, beta = inputs
    common = torch.randn(1, 1, HEADS, WIDTH, device="cuda")
    return q, (common + noise * torch.randn(k.shape, device="cuda")).bfloat16(), v, beta


def forgetting(tokens: int, slow_heads: int = 0) -> Inputs:
    """Like `layer_like`, but all heads forget within a thousand tokens, save the first ones.

    Keys are noise in all directions, and the step size of `slow_heads` heads is next to nothing.
    """
    q, k, v, beta = layer_like(tokens)
    beta = torch.ones_like(beta)
    beta[:slow_heads] = 1e-3
    return q, (0.15 * torch.randn_like(k)), v, beta


def poison() -> None:
    """Fill the allocator's free blocks with NaN, so that an unwritten output shows."""
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


def product_tflops(dtype: torch.dtype, size: int = 8192) -> float:
    """Rate of a product of two `size` x `size` matrices of noise, TFLOP/s."""
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    return 2 * size**3 / graph_ms(lambda: torch.mm(a, b)) / 1e9


def graph_ms(calls: Call | Sequence[Call], repeats: int = 11, warm: float = 0.2) -> float:
    """Median time of one call, in milliseconds, when a CUDA graph replays all of `calls`.

    Replays follow one another without a gap, at least three milliseconds a time, after `warm`
    seconds of the same, so that the clocks are those of this very work.
    """
    calls = calls if isinstance(calls, Sequence) else (calls,)
    with _replayed(calls) as replay:
        return _steady(replay, 3, repeats, warm) / len(calls)


def rested_ms(call: Call, repeats: int = 5, rest: float = 0.3) -> float:
    """Median time of one call, in milliseconds, when a CUDA graph replays it as validators do.

    After `rest` seconds without work three replays warm up, then ten are timed: the clocks have not
    come down yet to what the power limit leaves of them.
    """
    found = []
    with _replayed([call]) as replay:
        for _ in range(repeats):
            torch.cuda.synchronize()
            time.sleep(rest)
            replay(3)
            found.append(replay(10))
    return median(found)


@contextmanager
def _replayed(calls: Sequence[Call]) -> Iterator[Callable[[int], float]]:
    """Give a function that replays all calls so many times and returns milliseconds a time."""
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


def eager_ms(calls: Call | Sequence[Call], repeats: int = 11, warm: float = 0.2) -> float:
    """Median time of one call, in milliseconds: the host's clock from synchronize to synchronize.

    Calls follow one another for at least ten milliseconds, as in a loop over layers or tokens,
    after `warm` seconds of the same.
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

    return _steady(loop, 10, repeats, warm) / len(calls)


def _steady(run: Callable[[int], float], least_ms: float, repeats: int, warm: float) -> float:
    """Median of what `run(times)` returns, milliseconds a time, once `warm` seconds have passed."""
    run(2)
    once = run(3)
    times = max(1, round(least_ms / once))
    run(max(1, round(warm * 1e3 / once)))
    return median(run(times) for _ in range(repeats))


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
