"""What the processes do: prepare by compiling, and measure in their turn; with torch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks import autotuning
from benchmarks.engine import clocks
from benchmarks.engine.commands import say
from benchmarks.mechanisms.calls import PACKED_TOKENS, make
from benchmarks.mechanisms.measure import (
    NOT_REACHED,
    TUNED_TOKENS,
    Work,
    first_calls,
    first_packed_calls,
    rows,
    said,
)
from benchmarks.mechanisms.names import ENTRIES
from benchmarks.mechanisms.results import Missing, Rates
from benchmarks.mechanisms.turns import Left, Wait
from benchmarks.results import origin
from quasar_kernels.mount import mount

Steps = Generator[object, Left, None]

SOAK_SECONDS = 0.3
"""Work before a turn's first timing, so that the clocks are those of sustained work."""


def machine(device: str, commit: str | None) -> tuple[dict[str, Any], Rates]:
    """Return a run's own fields and what the GPU reaches; without a GPU, 1 of each."""
    if device == "cpu":
        return origin(commit, device), Rates(copy_gb_per_s=1, product_tflops=1)
    clocks.soak(SOAK_SECONDS)
    copies, products = clocks.copy_bandwidth(), clocks.product_tflops(torch.bfloat16)
    return origin(commit), Rates(copy_gb_per_s=copies, product_tflops=products)


def attempted(calls: Iterable[Callable[[], object]], name: str) -> None:
    """Run calls, going on where one fails: when it is measured, it fails again and is told."""
    for call in calls:
        try:
            call()
        except Exception as error:  # a compiler's, a launch's, whatever it is
            say(f"{name}: {said(error)}")


def operator(name: str, share: int, tokens: Sequence[int], variants: int, device: str) -> Steps:
    """Compile a share of an implementation's variants, and in its turns choose and measure.

    What packed sequences compile for the chosen variants is compiled in between, side by side.
    """
    mount()
    made, entry = make(name, device), ENTRIES[name]
    tokens = [n for n in tokens if entry.longest is None or n <= entry.longest]
    tuned = TUNED_TOKENS if entry.longest is None else entry.longest
    if device == "cuda":
        short = [n for n in tokens if n <= PACKED_TOKENS]
        with autotuning.compiling(variants, share, entry.shares):
            work = Work(name, made, PACKED_TOKENS, device)
            attempted(first_calls(work, [tuned, *short]), name)
            del work
        clocks.free()
        if share:
            return
        yield Wait.TURN
        with autotuning.brief(variants):
            clocks.soak(SOAK_SECONDS)
            work = Work(name, made, PACKED_TOKENS, device)
            attempted(first_calls(work, [tuned]), name)
        yield Wait.TOGETHER
        with autotuning.brief(variants, settled=True):
            attempted(first_packed_calls(work), name)
            del work
        clocks.free()
    left = yield Wait.TURN
    if left.seconds() <= 0:
        yield Missing(name=name, reason=NOT_REACHED)
        return
    with autotuning.brief(variants, settled=True) if device == "cuda" else nullcontext():
        if device == "cuda":
            clocks.soak(SOAK_SECONDS)
        yield from rows(Work(name, made, max(tokens), device), tokens, left.seconds)


def model(share: int, shares: int, variants: int, device: str) -> Steps:
    """Compile a share of what the hybrid model's training needs, and train it in its turn."""
    mount()
    from benchmarks.mechanisms.layers import RECIPE, SMALL, STEPS, TRIAL, trainings

    if device == "cuda":
        with autotuning.compiling(variants, share, shares):
            attempted([lambda: list(trainings(device, SMALL, 1))], "model")
        if share:
            return
    left = yield Wait.TURN
    if left.seconds() <= 0:
        yield Missing(name="model", reason=NOT_REACHED)
        return
    with autotuning.brief(variants) if device == "cuda" else nullcontext():
        yield from trainings(device, *((RECIPE, STEPS) if device == "cuda" else (TRIAL, 1)))
