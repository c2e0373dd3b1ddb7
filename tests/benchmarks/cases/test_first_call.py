"""The calls of `first_call` on a CPU, and its limits."""

import pytest
import torch

from benchmarks.cases import first_call
from benchmarks.engine.limits import missed
from benchmarks.engine.results import Entry
from quasar_kernels.mount import mount
from tests.benchmarks.runs import run_of

mount()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(first_call, "DEVICE", "cpu")
    monkeypatch.setattr(first_call, "TOKENS", 33)


@pytest.mark.parametrize("name", first_call.CASES)
def test_every_call_runs(monkeypatch, name):
    make = first_call.CASES[name]
    if make.func is first_call._operator:  # the shapes are of the whole length
        module, function, (B, T, *heads), *rest = make.args
        shape = (B, min(T, 33), *heads)
        results = make.func(module, function, shape, *rest, **make.keywords)()
    else:
        results = make()()
    assert all(torch.isfinite(x).all() for x in results if x is not None)


def test_a_slow_first_call_and_a_failed_one_miss_their_limits():
    def entry(name, **results):
        return Entry(table="calls", of={"call": name}, by="ours", **results)

    first, other = list(first_call.CASES)[:2]
    figures = {"first_s": 3.5, "host_ms": 0.5, "wall_ms": 0.8}
    entries = entry(first, figures=figures), entry(other, failure="killed after 300 s")
    run = run_of("first_call", *entries)
    lines = missed(first_call.limits(run))
    assert lines == [f"{first}, first call, s: 3.5, limit 3", f"{other}, timed: 0, limit 1"]
