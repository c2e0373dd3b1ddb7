"""Candidates of Triton's autotuner are compiled before the first one runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

from benchmarks.engine.tuning import tune_quickly


class Driver:
    """An H200's compiler target without an H200."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


@triton.jit
def add_one(x, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def test_all_candidates_are_compiled_and_a_broken_one_stops_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Autotuner, "prune_configs", Autotuner.prune_configs)  # restored
    driver.set_active(Driver())  # type: ignore[arg-type] # what is needed of one
    try:
        tune_quickly()
        blocks = (16, 32, 48)  # a block of 48 does not compile
        tuner = triton.autotune([triton.Config({"B": b}) for b in blocks], key=["n"])(add_one)
        tuner.nargs = {"x": torch.zeros(50), "n": 50}
        assert len(tuner.prune_configs({"grid": (1,), "warmup": False})) == 3
        ((kernels, *_),) = add_one.device_caches.values()
        compiled = [k for k in kernels.values() if isinstance(k, CompiledKernel)]
        assert ["add_one" in k.asm["ptx"] for k in compiled] == [True, True]
    finally:
        driver._active = None  # `reset_active` needs a GPU
