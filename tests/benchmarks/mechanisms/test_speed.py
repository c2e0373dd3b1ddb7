"""The command: what it makes of what its processes say, whatever comes first."""

from __future__ import annotations

from datetime import date

import pytest

from benchmarks.mechanisms import speed
from benchmarks.mechanisms.names import ENTRIES, MACHINE
from benchmarks.mechanisms.results import MechanismsResults, Missing, Rates, Row, Trained
from benchmarks.mechanisms.speed import Machine, Options, measure
from benchmarks.mechanisms.turns import Lost
from tests.harness import samples

ORIGIN = {"created": date(2026, 1, 1), "commit": None, "environment": samples.environment()}
THE_MACHINE = Machine(ORIGIN, Rates(copy_gb_per_s=4000, product_tflops=500))
A_ROW = Row(
    name="quasar", way="forward", batch=1, tokens=256, ms=1, clock="graph", peak_bytes=1,
    moved_bytes=1, errors={"o": 1e-3},
)  # fmt: skip
A_TRAINING = Trained(
    setting="kept", parameters=1, batch=1, tokens=8, step_ms=1, peak_bytes=1, loss=1, backends={}
)


def test_a_failure_before_the_machine_tells_of_itself_is_kept(monkeypatch) -> None:
    lost = Lost("mamba2", "ModuleNotFoundError: no mamba_ssm")
    why = Missing(name="kda", reason="out of memory", way="forward", tokens=256)
    asked: list[tuple[str, int]] = []
    kept: list[MechanismsResults] = []

    def in_turns(worker, shares, options, limit):
        asked.extend(shares)
        yield from (lost, THE_MACHINE, A_ROW, why, A_TRAINING)

    monkeypatch.setattr(speed, "in_turns", in_turns)
    options = Options((256,), "cuda", None)
    results = measure(["quasar", "mamba2", "kda"], options, 100, kept.append)
    assert asked == [(MACHINE, 1), ("quasar", 1), ("mamba2", 1), ("kda", ENTRIES["kda"].shares)]
    assert results.rows == (A_ROW,)
    assert results.trained == (A_TRAINING,)
    assert results.missing == (Missing(name="mamba2", reason=lost.reason), why)
    assert [len(r.rows) + len(r.trained) + len(r.missing) for r in kept] == [1, 2, 3, 4]


def test_without_a_machine_there_is_no_run(monkeypatch) -> None:
    messages = [A_ROW, Lost(MACHINE, "RuntimeError: no GPU")]
    monkeypatch.setattr(speed, "in_turns", lambda *_: iter(messages))
    with pytest.raises(SystemExit, match="no GPU"):
        measure(["quasar"], Options((256,), "cuda", None), 100, lambda _: None)
