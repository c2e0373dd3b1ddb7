"""Short tuning of libraries in which Triton's autotuner chooses among dozens of kernels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

TRIAL_MS = 20
"""How long each candidate runs; Triton's own 100 ms would add minutes."""


def tune_quickly() -> None:
    """Let all autotuners of this process compile their candidates in parallel, on all cores."""
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    prune = Autotuner.prune_configs

    def compiled(tuner: Any, kwargs: dict[str, Any]) -> list[Any]:
        tuner.do_bench = partial(do_bench, warmup=TRIAL_MS // 4, rep=TRIAL_MS)
        candidates: list[Any] = prune(tuner, kwargs)
        call = {**tuner.nargs, **kwargs, "warmup": True}  # compiles without launching
        with ThreadPoolExecutor() as pool, AsyncCompileMode(pool, ignore_errors=True):
            for candidate in candidates:
                with suppress(Exception):  # the tuner meets the same error, and handles it
                    tuner.fn.run(**{**call, **candidate.all_kwargs()})
        return candidates

    Autotuner.prune_configs = compiled  # type: ignore[assignment, method-assign]
