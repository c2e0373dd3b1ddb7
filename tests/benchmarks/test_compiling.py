"""Variants that are compiled side by side, by real processes and Triton's own autotuner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.runtime.autotuner import Autotuner

from benchmarks import compiling
from benchmarks.compiling import Share

CALLEE = """\
import os, pathlib, sys, time
flag, folder, place, of = sys.argv[1:]
assert flag == "--compile" and of == "2"
pathlib.Path(folder, place).write_text(os.environ["FLA_CACHE_RESULTS"])
until = time.monotonic() + 20
while not pathlib.Path(folder, str(1 - int(place))).exists():  # until the other has started
    assert time.monotonic() < until
    time.sleep(0.01)
assert place == "0"
pathlib.Path(folder, "ended").touch()
"""


def test_shares_run_at_once_and_one_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "callee.py").write_text(CALLEE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 7})
    compiling.side_by_side("callee", tmp_path)
    found = {path.name: path.read_text() for path in tmp_path.iterdir() if not path.suffix}
    assert found == {"0": "0", "1": "0", "ended": ""}


class Kernel:
    """What an autotuner calls: it notes the variants, one of which no machine can run."""

    def __init__(self, called: list[int]) -> None:
        self.called, self.fn = called, lambda size: size

    def run(self, *_: Any, num_warps: int, **__: Any) -> None:
        """Note a variant."""
        self.called.append(num_warps)
        if num_warps == 8:
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")


def tuner(called: list[int]) -> Autotuner:
    """Return an autotuner of five variants; `called` gets those that run."""
    configs = [triton.Config({}, num_warps=1 << n) for n in range(5)]
    return Autotuner(Kernel(called), ["size"], configs, ["size"], None, None)


def test_shares_compile_every_variant_between_them_and_time_none() -> None:
    compiled: list[set[int]] = []
    for place in range(3):
        called: list[int] = []
        with Share(place, 3).of_variants():
            tuner(called).run(7)
        compiled.append(set(called))
        assert len(called) <= 3  # two of the share, and the one that is then launched
    assert set.union(*compiled) == {1, 2, 4, 8, 16}


def test_work_is_dealt_to_one_share_each() -> None:
    for number in range(10):
        assert sum(Share(place, 4).has(number) for place in range(4)) == 1
    assert Share.parse(["--compile", "a", "3", "16"]) == (3, 16)


def test_the_fastest_variant_is_still_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: 3.0, 2: 2.0, 4: 1.0, 16: 4.0}
    called: list[int] = []

    def bench(call: Any, warmup: int, rep: int, quantiles: Any) -> list[float]:
        assert (warmup, rep) == (compiling.WARM_MS, compiling.TIMED_MS)
        call()
        return [seconds[called[-1]]] * len(quantiles)

    monkeypatch.setattr("triton.testing.do_bench", bench)
    with compiling.quickly_tuned():
        tuner(called).run(7)
    assert called == [1, 2, 4, 8, 16, 4]


def test_a_failure_is_said_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    compiling.attempt("host", lambda: 1 / 0)
    assert "host did not compile: ZeroDivisionError" in capsys.readouterr().err
