"""The comparison of implementations, with a fake clock and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from benchmarks.engine.clocks import steady
from benchmarks.engine.comparison import WAYS, Comparison, Function, Inputs, Way
from benchmarks.engine.results import Scalar


def product(x: Inputs) -> torch.Tensor:
    return x["q"] * x["w"]


def broken(x: Inputs) -> torch.Tensor:
    raise RuntimeError("no such kernel")


def unsteady(x: Inputs) -> torch.Tensor:
    return product(x) * (1 + 1e-3 * torch.rand(()))


def late(x: Inputs) -> torch.Tensor:
    """Leave a token unwritten that lies after the tokens that are compared."""
    o = product(x)
    o[:, 7] = float("nan")
    return o


FUNCTIONS: dict[str, Function] = {
    "right": product,
    "wrong": lambda x: product(x) + 1,
    "unsteady": unsteady,
    "broken": broken,
    "late": late,
    "leaking": lambda x: product(x) + 0.5 * product(x).sum(1, keepdim=True),
}


@contextmanager
def select(name: str) -> Iterator[Function]:
    yield FUNCTIONS[name]


def exact(x: Inputs, state: object, bounds: object) -> tuple[torch.Tensor, None]:
    return product(x), None


def clock(call: Callable[[], object], rested: bool) -> dict[str, float]:
    call()
    return {"graph_ms": 1.5, **({"rested_ms": 1.0} if rested else {})}


COMPARISON = Comparison(select, exact, dict.fromkeys(WAYS, 5), clock)


@pytest.mark.parametrize("way", WAYS)
def test_each_implementation_is_compared_and_timed_or_named_with_its_error(way: Way) -> None:
    torch.manual_seed(0)
    x = {"q": torch.randn(2, 9, 3, 4), "w": torch.randn(3, 4)}
    of: dict[str, Scalar] = {"way": way, "tokens": 9}
    do, names = torch.randn_like(x["q"]), list(FUNCTIONS)
    found = {entry.by: entry for entry in COMPARISON.entries(of, way, x, do, names, ["right"])}
    assert list(found) == names
    tensors = {"o"} if way == "forward" else {"q", "w"}
    assert set(found["right"].errors) == tensors
    assert max(found["right"].errors.values()) < 1e-6
    assert found["right"].figures == {"graph_ms": 1.5, "rested_ms": 1.0, "repeats": True}
    assert found["unsteady"].figures == {"graph_ms": 1.5, "repeats": False}
    assert found["broken"].failure == "RuntimeError: no such kernel"
    words = {"wrong": "relative RMS error of o", "late": "o is not finite everywhere"}
    if way == "forward and backward":
        words = {"leaking": "the relative RMS error of"}
    for name, text in words.items():
        assert text in str(found[name].failure)
        assert not found[name].figures
    assert all(entry.of == of for entry in found.values())


def test_a_steady_time_is_a_median_after_a_warm_up() -> None:
    runs: list[int] = []

    def run(times: int) -> float:
        runs.append(times)
        return 2.0 if len(runs) != 6 else 50.0  # one timing is disturbed

    assert steady(run, least_ms=10, repeats=5, warm=0.1) == 2.0
    assert runs == [2, 3, 50, 5, 5, 5, 5, 5]  # 100 ms to warm up, then 10 ms each
