"""The comparison of implementations, with a fake clock and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from benchmarks.engine.clocks import steady
from benchmarks.engine.comparison import WAYS, Comparison, Function, Inputs
from benchmarks.engine.results import Scalar


def product(x: Inputs) -> torch.Tensor:
    return x["q"] * x["w"]


def broken(x: Inputs) -> torch.Tensor:
    raise RuntimeError("no such kernel")


def unsteady(x: Inputs) -> torch.Tensor:
    return product(x) * (1 + 1e-3 * torch.rand(()))


FUNCTIONS: dict[str, Function] = {
    "right": product,
    "wrong": lambda x: product(x) + 1,
    "unsteady": unsteady,
    "broken": broken,
}


@contextmanager
def select(name: str) -> Iterator[Function]:
    yield FUNCTIONS[name]


def clock(call: Callable[[], object], rested: bool) -> dict[str, float]:
    call()
    return {"graph_ms": 1.5, **({"rested_ms": 1.0} if rested else {})}


COMPARISON = Comparison(select, product, dict.fromkeys(WAYS, 5), clock)


@pytest.mark.parametrize("way", WAYS)
def test_each_implementation_is_compared_timed_or_named_with_its_error(way: str) -> None:
    torch.manual_seed(0)
    x = {"q": torch.randn(2, 9, 3, 4), "w": torch.randn(3, 4)}
    of: dict[str, Scalar] = {"way": way, "tokens": 9}
    do = torch.randn_like(x["q"])
    found = {entry.by: entry for entry in COMPARISON.entries(of, x, do, list(FUNCTIONS), ["wrong"])}
    assert list(found) == list(FUNCTIONS)
    tensors = {"o"} if way == "forward" else {"q", "w"}
    assert set(found["right"].errors) == tensors
    assert max(found["right"].errors.values()) < 1e-6
    assert found["right"].figures == {"graph_ms": 1.5, "repeats": True}
    assert found["wrong"].figures["rested_ms"] == 1.0
    if way == "forward":
        assert found["wrong"].errors["o"] > 0.1
    assert not found["unsteady"].figures["repeats"]
    assert found["broken"].failure == "RuntimeError: no such kernel"
    assert not found["broken"].figures
    assert all(entry.of == of for entry in found.values())


def test_a_steady_time_is_a_median_after_a_warm_up() -> None:
    runs: list[int] = []

    def run(times: int) -> float:
        runs.append(times)
        return 2.0 if len(runs) != 6 else 50.0  # one timing is disturbed

    assert steady(run, least_ms=10, repeats=5, warm=0.1) == 2.0
    assert runs == [2, 3, 50, 5, 5, 5, 5, 5]  # 100 ms to warm up, then 10 ms each
