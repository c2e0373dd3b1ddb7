"""Triton's autotuners under a short run: compile by shares, choose briefly.

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

WARM_MS, TIMED_MS = 1, 4
"""A variant's timing; Triton's own takes 25 and 100 ms."""


@contextmanager
def compiling(share: int = 0, shares: int = 1) -> Iterator[None]:
    """Have autotuners compile each `shares`th of their variants; what this chooses is forgotten."""
    from triton.runtime.autotuner import Autotuner

    before: dict[int, tuple[Any, dict[Any, Any]]] = {}

    def compiled(self: Any, *args: Any, config: Any, **meta: Any) -> Sequence[float]:
        before.setdefault(id(self), (self, dict(self.cache)))
        place = next((n for n, known in enumerate(self.configs) if known is config), 0)
        if place % shares != share:
            return [float("inf")] * 3
        try:
            kernel = self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
            kernel._init_handles()  # whether the GPU has the registers and the memory for it
        except Exception:  # what fails to compile is not chosen; the turn will say why
            return [float("inf")] * 3
        return [0.0] * 3

    try:
        with patch.object(Autotuner, "_bench", compiled):
            yield
    finally:
        for tuner, chosen in before.values():
            tuner.cache = chosen


@contextmanager
def brief() -> Iterator[None]:
    """Have autotuners time each variant for some milliseconds."""
    from triton.runtime.autotuner import Autotuner

    def timed(call: Any, quantiles: Sequence[float]) -> Any:
        from triton.testing import do_bench

        measure: Any = do_bench
        return measure(call, warmup=WARM_MS, rep=TIMED_MS, quantiles=quantiles)

    with patch.object(Autotuner, "do_bench", property(lambda self: timed)):
        yield
