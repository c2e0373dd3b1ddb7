"""What kernels take of a GPU, with launches and a driver of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton

from harness.tuning.footprint import footprint, launched


def kernel(name: str, warps: int, shared: int) -> SimpleNamespace:
    metadata = SimpleNamespace(num_warps=warps, shared=shared)
    return SimpleNamespace(name=name, metadata=metadata, function=7, n_regs=96, n_spills=2)


def test_each_kernel_that_is_launched_is_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = kernel("first", 4, 0), kernel("second", 4, 0)
    run = lambda self, *args, **options: args[0]  # noqa: E731 # stands in for a launch
    monkeypatch.setattr(triton.JITFunction, "run", run)
    launch: Any = triton.JITFunction.run
    with launched() as found:
        launched_now: Any = triton.JITFunction.run
        assert [launched_now(None, one) for one in (first, second, first, None)][2] is first
    assert found == [first, second]
    assert triton.JITFunction.run is launch


def test_occupancy_is_the_share_of_a_multiprocessors_warps() -> None:
    asked = []

    def blocks(function: int, threads: int, shared: int) -> int:
        asked.append((function, threads, shared))
        return 3

    found = footprint([kernel("walk", 8, 40_000)], 64, blocks)
    assert asked == [(7, 256, 40_000)]
    assert found["walk"]["occupancy"] == 3 * 8 / 64
    assert found["walk"]["registers"] == 96
    assert found["walk"]["spills"] == 2
