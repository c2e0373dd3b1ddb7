"""The resource usage of kernels, with fake launches and a fake driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton

from harness.tuning import footprint as module
from harness.tuning.footprint import launched


def kernel(name: str, warps: int, shared: int) -> SimpleNamespace:
    metadata = SimpleNamespace(num_warps=warps, shared=shared)
    return SimpleNamespace(name=name, metadata=metadata, function=7, n_regs=96, n_spills=2)


def test_each_launched_kernel_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = kernel("first", 4, 0), kernel("second", 4, 0)
    run = lambda self, *args, **options: args[0]  # noqa: E731 # a fake launch
    monkeypatch.setattr(triton.JITFunction, "run", run)
    launch: Any = triton.JITFunction.run
    with launched() as kernels:
        launched_now: Any = triton.JITFunction.run
        assert [launched_now(None, one) for one in (first, second, first, None)][2] is first
    assert kernels == [first, second]
    assert triton.JITFunction.run is launch


def test_occupancy_is_the_share_of_a_multiprocessors_warps(monkeypatch):
    resident = {(7, 256, 40_000): 3}  # blocks of a multiprocessor, as the driver counts them
    monkeypatch.setattr(module, "blocks_at_once", lambda *arguments: resident[arguments])
    usage = module.footprint([kernel("walk", 8, 40_000)], 64)["walk"]
    assert usage["occupancy"] == 3 * 8 / 64
    assert (usage["registers"], usage["spills"]) == (96, 2)
