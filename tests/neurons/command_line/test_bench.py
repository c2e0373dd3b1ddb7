"""`bench` measures as the miner does: the same lengths, runs, repetitions and refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.measuring.runner import MeasurementError
from harness.report import load_report
from neurons.command_line import commands
from neurons.configuration.flags import Given
from neurons.errors import Held
from neurons.mining.daemon import run_cycle
from neurons.mining.measuring.series import new_series
from tests.neurons.mining.parts import (
    ENVIRONMENT,
    SETTLED,
    StandInBench,
    StandInFork,
    make_context,
    make_settings,
)

CRASH = MeasurementError("died", "crash")


def bench(
    folder: Path,
    measure: StandInBench,
    monkeypatch: pytest.MonkeyPatch,
    *,
    all_lengths: bool = False,
    **flags: Any,
) -> int:
    """Return the exit status of `bench` with stand-ins for the fork and the harness."""
    settings = make_settings(folder, **flags)
    monkeypatch.setattr(commands, "read_settings", lambda _: (settings, False))
    monkeypatch.setattr(commands, "open_fork", lambda _: StandInFork(folder / "fork"))
    monkeypatch.setattr(commands, "describe_machine", lambda _: ENVIRONMENT)
    monkeypatch.setattr(
        commands, "new_series", partial(new_series, measure=measure, check=measure.check)
    )
    monkeypatch.setattr(commands, "backoff_seconds", lambda *_, **__: 0.0)
    return commands.bench(Given(), all_lengths)


@pytest.mark.parametrize(
    "faults",
    [
        {},
        {1024: [CRASH] * 2},
        {1024: [CRASH] * 3},
        {1024: [MeasurementError("no memory", "out_of_memory")]},
        {512: [MeasurementError("wrong results", "gate")]},
    ],
)
def test_bench_starts_the_processes_that_the_miner_starts(
    tmp_path: Path,
    url: str,
    faults: dict[int, list[Exception | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = StandInBench(faults={length: list(errors) for length, errors in faults.items()})
    try:
        done = bench(tmp_path / "bench", shown, monkeypatch) == 0
    except Held:
        done = False
    mined = StandInBench(faults=faults)
    run_cycle(make_context(tmp_path / "mine", url, measure=mined))
    assert sorted(shown.calls) == sorted(mined.calls)
    assert done is (shown.calls.count(2048) == len(SETTLED))


def test_bench_keeps_a_report_and_shows_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, StandInBench(), monkeypatch) == 0
    report = load_report(tmp_path / "reports" / "bench.json")
    assert [m.length for m in report.measurements] == [512, 1024, *SETTLED]
    assert "slowest tokens/s" in capsys.readouterr().out


def test_the_other_lengths_are_measured_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, flags = StandInBench(), {"claim_runs": 2, "target_sequence_length": 512}
    assert bench(tmp_path, measure, monkeypatch, all_lengths=True, **flags) == 0
    assert sorted(measure.calls) == [*[512] * 5, 1024, 1024, 2048, 2048]
    report = load_report(tmp_path / "reports" / "bench.json")
    assert len(report.measurements) == len(measure.calls)


def test_bench_refuses_what_the_miner_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = StandInBench()
    with pytest.raises(Held, match="TARGET_SEQUENCE_LENGTH=100000 cannot be measured"):
        bench(tmp_path, measure, monkeypatch, target_sequence_length=100_000)
    assert measure.calls == []
