"""What the processes do: prepare by compiling, and measure in their turn; with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks import clocks
from benchmarks.commands import say
from benchmarks.mechanisms import tuning
from benchmarks.mechanisms.calls import make
from benchmarks.mechanisms.measure import (
    COMPILED_TOKENS,
    TUNED_TOKENS,
    Work,
    first_calls,
    rows,
    said,
)
from benchmarks.mechanisms.names import ENTRIES
from benchmarks.mechanisms.results import Missing, Rates
from benchmarks.mechanisms.turns import Turn
from benchmarks.results import origin
from quasar_kernels.mount import mount

SOAK_SECONDS = 0.5
"""Work before a turn's first timing, so that the clocks are those of sustained work."""


def machine(device: str, commit: str | None) -> tuple[dict[str, Any], Rates]:
    """Return a run's own fields and what the GPU reaches; without one, one of each."""
    if device == "cpu":
        return origin(commit, device), Rates(copy_gb_per_s=1, product_tflops=1)
    clocks.soak(SOAK_SECONDS)
    copies, products = clocks.copy_bandwidth(), clocks.product_tflops(torch.bfloat16)
    return origin(commit), Rates(copy_gb_per_s=copies, product_tflops=products)


def attempted(calls: Iterator[Callable[[], object]], name: str) -> None:
    """Run calls, going on where one fails: when it is measured, it fails again and is told."""
    for call in calls:
        try:
            call()
        except Exception as error:  # a compiler's, a launch's, whatever it is
            say(f"{name}: {said(error)}")


def operator(
    name: str, share: int, tokens: Sequence[int], device: str
) -> Callable[[Turn], Iterator[object]]:
    """Compile a share of an implementation's variants, and return what measures it."""
    on_gpu = device == "cuda"
    try:
        mount()
        made = make(name, device)
        if on_gpu:
            with tuning.compiling(share, ENTRIES[name].shares):
                work = Work(name, made, TUNED_TOKENS, device)
                attempted(first_calls(work, [COMPILED_TOKENS, TUNED_TOKENS]), name)
                del work
            clocks.free()
    except Exception as error:  # an import's, most of all: the table says so
        reason = said(error)
        return lambda turn: iter([Missing(name=name, reason=reason)])

    def measured(turn: Turn) -> Iterator[object]:
        try:
            with tuning.brief() if on_gpu else nullcontext():
                if on_gpu:
                    clocks.soak(SOAK_SECONDS)
                    longest = min(TUNED_TOKENS, max(tokens))
                    attempted(first_calls(Work(name, made, longest, device), [longest]), name)
                    clocks.free()
                yield from rows(Work(name, made, max(tokens), device), tokens, turn.left)
        except Exception as error:  # of a first call or of the inputs' memory
            yield Missing(name=name, reason=said(error))

    return measured


def model(share: int, shares: int, device: str) -> Callable[[Turn], Iterator[object]]:
    """Compile a share of what the hybrid model's training needs, and return what measures it."""
    on_gpu = device == "cuda"
    try:
        mount()
        from benchmarks.mechanisms.layers import RECIPE, SMALL, STEPS, TRIAL, trainings

        if on_gpu:
            with tuning.compiling(share, shares):
                attempted(iter([lambda: list(trainings(device, SMALL, 1))]), "model")
    except Exception as error:
        reason = said(error)
        return lambda turn: iter([Missing(name="model", reason=reason)])

    def measured(turn: Turn) -> Iterator[object]:
        if turn.left() <= 0:
            yield Missing(name="model", reason="not reached within the limit")
            return
        try:
            with tuning.brief() if on_gpu else nullcontext():
                yield from trainings(device, *((RECIPE, STEPS) if on_gpu else (TRIAL, 1)))
        except Exception as error:  # out of memory, a launch's: the rest is measured all the same
            yield Missing(name="model", reason=said(error))

    return measured
