"""Autotuners that compile by shares and choose briefly; the kernels are stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.runtime.autotuner import Autotuner

from benchmarks import autotuning


class Compiled:
    def _init_handles(self) -> None:
        pass


class Kernel:
    """Notes with how many warps it is compiled and launched."""

    def __init__(self) -> None:
        self.compiled: list[int] = []
        self.launched: list[int] = []

    def run(self, *_: Any, num_warps: int, warmup: bool, **__: Any) -> Compiled:
        if warmup and num_warps == 16:
            raise RuntimeError("too many")
        (self.compiled if warmup else self.launched).append(num_warps)
        return Compiled()


@triton.jit
def nothing(x):  # pragma: no cover it is never compiled
    pass


WARPS = (1, 2, 4, 8, 16)


@pytest.fixture
def tuner() -> tuple[Autotuner, Kernel]:
    configs = [triton.Config({}, num_warps=n) for n in WARPS]
    found = triton.autotune(configs=configs, key=["x"])(nothing)
    kernel = Kernel()
    found.fn = kernel
    return found, kernel


def test_shares_compile_all_variants_and_time_none(tuner: tuple[Autotuner, Kernel]) -> None:
    found, kernel = tuner
    with autotuning.compiling(0, 0, 2):
        found.run(7, grid=(1,), warmup=False)
        found.run(7, grid=(1,), warmup=False)
    assert kernel.compiled == [1, 4]  # the last cannot be, and is not chosen
    assert kernel.launched == [1, 1]
    assert found.cache == {}
    with autotuning.compiling(0, 1, 2):
        found.run(7, grid=(1,), warmup=False)
    assert kernel.compiled == [1, 4, 2, 8]
    assert kernel.launched[2:] == [2]
    found.cache[7,] = found.configs[3]  # what was chosen before stays chosen
    with autotuning.compiling(3):
        found.run(7, grid=(1,), warmup=False)
        found.run(8, grid=(1,), warmup=False)
    assert kernel.launched[3:] == [8, 1]
    assert found.cache == {(7,): found.configs[3]}


def test_a_share_that_cannot_be_compiled_takes_one_of_another(
    tuner: tuple[Autotuner, Kernel],
) -> None:
    found, kernel = tuner
    with autotuning.compiling(0, 4, 5):  # the last alone
        found.run(7, grid=(1,), warmup=False)
    assert kernel.compiled == [1]
    assert kernel.launched == [1]


@pytest.mark.parametrize(
    ("most", "left"), [(0, WARPS), (5, WARPS), (3, (1, 4, 16)), (2, (1, 16)), (1, (1,))]
)
def test_variants_are_thinned_evenly(most: int, left: tuple[int, ...]) -> None:
    assert tuple(autotuning.thinned(WARPS, most)) == left


def test_a_variant_is_timed_briefly(
    tuner: tuple[Autotuner, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, kernel = tuner
    given = []

    def do_bench(call: Any, **options: Any) -> float:
        call()
        given.append(options)
        return 1.0 / kernel.launched[-1]  # the more warps, the faster

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    with autotuning.brief(0):
        found.run(7, grid=(1,), warmup=False)
    assert {(o["warmup"], o["rep"]) for o in given} == {(autotuning.WARM_MS, autotuning.TIMED_MS)}
    assert kernel.launched == [*WARPS, 16]
    with autotuning.brief(3, settled=True):
        found.run(8, grid=(1,), warmup=False)
    assert kernel.launched[6:] == [16, 16]  # timed alone, and launched
    found.cache.clear()
    with autotuning.brief(3, settled=True):
        found.run(8, grid=(1,), warmup=False)
    assert kernel.launched[8:] == [1, 4, 16, 16]
