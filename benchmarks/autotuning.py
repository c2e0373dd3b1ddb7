"""Triton's autotuners under a short run: compiled by shares, chosen briefly, among few if asked.

The host library keeps the choice of its variants in memory, or between processes on disk. While
others compile on the same GPU a choice is of no use, so a call first only compiles: the processes
of one implementation compile a share of the variants each and none is timed. What each finds in
Triton's cache afterwards it then chooses from when its turn has come, with short timings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

WARM_MS, TIMED_MS = 2, 10
"""A variant's timing; Triton's own takes 25 and 100 ms."""


def thinned(variants: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many variants, evenly spread over the list; all where `most` is 0."""
    count = len(variants)
    if not most or count <= most:
        return list(variants)
    if most == 1:
        return [variants[0]]
    return [variants[round(n * (count - 1) / (most - 1))] for n in range(most)]


@contextmanager
def compiling(most: int, share: int = 0, shares: int = 1) -> Iterator[None]:
    """Have autotuners compile every `shares`th of `most` variants; the choice is forgotten.

    Where none of a share can be, which would keep a call from its other kernels, one of another
    share is compiled as well.
    """
    from triton.runtime.autotuner import Autotuner

    pruned = Autotuner.prune_configs
    before: dict[int, tuple[Any, dict[Any, Any]]] = {}
    mine: dict[int, list[Any]] = {}
    usable: dict[int, bool] = {}

    def ordered(self: Any, kwargs: Any) -> list[Any]:
        before.setdefault(id(self), (self, dict(self.cache)))
        variants = thinned(pruned(self, kwargs), most)
        mine[id(self)] = variants[share::shares]
        usable[id(self)] = False
        return [*mine[id(self)], *(v for n, v in enumerate(variants) if n % shares != share)]

    def compiled(self: Any, *args: Any, config: Any, **meta: Any) -> Sequence[float]:
        if usable[id(self)] and not any(config is one for one in mine[id(self)]):
            return [float("inf")] * 3
        try:
            kernel = self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
            kernel._init_handles()  # whether the GPU has the registers and the memory for it
        except Exception:  # what fails to compile is not chosen; the turn will say why
            return [float("inf")] * 3
        usable[id(self)] = True
        return [0.0] * 3

    try:
        with patch.multiple(Autotuner, _bench=compiled, prune_configs=ordered):
            yield
    finally:
        for tuner, chosen in before.values():
            tuner.cache = chosen


@contextmanager
def brief(most: int = 0, settled: bool = False) -> Iterator[None]:
    """Have autotuners time each of at most so many variants (0: all) for some milliseconds.

    With `settled` a kernel that has chosen before keeps to that, whatever it is called with.
    """
    from triton.runtime.autotuner import Autotuner

    pruned = Autotuner.prune_configs

    def few(self: Any, kwargs: Any) -> list[Any]:
        if settled and self.cache:
            return [next(iter(self.cache.values()))]
        return thinned(pruned(self, kwargs), most)

    def timed(call: Any, quantiles: Sequence[float]) -> Any:
        from triton.testing import do_bench

        measure: Any = do_bench
        return measure(call, warmup=WARM_MS, rep=TIMED_MS, quantiles=quantiles)

    done_by = property(lambda _: timed)
    with patch.multiple(Autotuner, do_bench=done_by, prune_configs=few):
        yield
