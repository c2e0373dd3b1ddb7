"""Several lengths in a row, and the command line on top of them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from harness import sweep as module
from harness.__main__ import main
from harness.report import load_report
from harness.runner import MeasurementError
from harness.sweep import sweep
from tests.harness.samples import gate_result, measurement


class Stand:
    """Stands in for the runner: speeds by length, and lengths that fail."""

    def __init__(self, **failures: MeasurementError) -> None:
        self.failures = {int(name[1:]): error for name, error in failures.items()}
        self.calls: list[tuple[Any, ...]] = []

    def check(self, tree: Path, length: int, **options: Any) -> Any:
        self.calls.append(("check", length))
        return gate_result()

    def measure(self, tree: Path, length: int, **options: Any) -> Any:
        self.calls.append(("measure", length, options["gate"], options["cold_cache"]))
        if length in self.failures:
            raise self.failures[length]
        return measurement(length)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    stand = Stand()
    monkeypatch.setattr(module, "check", stand.check)
    monkeypatch.setattr(module, "measure", stand.measure)
    return stand


def test_each_length_is_gated_once_and_run_in_processes_of_its_own(
    stand: Stand, tmp_path: Path
) -> None:
    found = sweep(tmp_path, [1024, 512, 512], runs=2, cold_cache=True)
    green = gate_result()
    assert stand.calls == [
        ("check", 512),
        ("measure", 512, green, True),
        ("measure", 512, green, False),
        ("check", 1024),
        ("measure", 1024, green, True),
        ("measure", 1024, green, False),
    ]
    assert [m.length for m in found.measurements] == [512, 512, 1024, 1024]


def test_a_failed_length_leaves_the_others(stand: Stand, tmp_path: Path) -> None:
    stand.failures = {1024: MeasurementError("it died", "crash", "last words")}
    told: list[str] = []
    found = sweep(
        tmp_path,
        [512, 1024, 2048],
        runs=1,
        gated=False,
        progress=lambda event, length, text: told.append(f"{event} {length} {text}"),
    )
    assert sorted(found.runs) == [512, 2048]
    (failure,) = found.failures
    assert (failure.length, failure.kind, failure.reason) == (1024, "crash", "it died")
    assert "log 1024 last words" in told
    assert all(call[2] is False for call in stand.calls)


def test_nothing_longer_than_what_ran_out_of_memory_is_tried(stand: Stand, tmp_path: Path) -> None:
    stand.failures = {1024: MeasurementError("CUDA out of memory", "out_of_memory")}
    found = sweep(tmp_path, [512, 1024, 2048], runs=1)
    assert sorted(found.runs) == [512]
    assert [f.length for f in found.failures] == [1024, 2048]
    assert {f.kind for f in found.failures} == {"out_of_memory"}
    assert not any(call[1] == 2048 for call in stand.calls)


@pytest.mark.parametrize("kind", ["stopped", "import"])
def test_what_no_length_would_survive_ends_the_sweep(
    kind: Any, stand: Stand, tmp_path: Path
) -> None:
    stand.failures = {512: MeasurementError("for one reason", kind)}
    with pytest.raises(MeasurementError, match="for one reason"):
        sweep(tmp_path, [512, 1024], runs=1, stop=threading.Event())
    assert not any(call[1] == 1024 for call in stand.calls)


def test_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs 0"):
        sweep(tmp_path, [512], runs=0)


# ---- the command line, for real ---------------------------------------------------------------


def test_a_run_from_the_command_line(
    make_tree: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "report.json"
    arguments = ["--tree", str(make_tree()), "--lengths", "16", "--runs", "2", "--device", "cpu"]
    assert main([*arguments, "--ungated", "--json", str(out)]) == 0
    report = load_report(out)
    assert [m.length for m in report.measurements] == [16, 16]
    assert not report.checked
    assert report.environment is not None
    printed = capsys.readouterr()
    assert "NOT CHECKED" in printed.out
    slowest = min(m.tokens_per_sec for m in report.measurements)
    assert f"{slowest:,.0f}" in printed.out
    assert "no GPU" in printed.err


def test_the_schema_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["required"] == ["sha256", "report"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--tree is required"),
        (["--tree", ".", "--lengths", "512,x"], "512,x"),
        (["--tree", ".", "--lengths", "0"], "'0'"),
        (["--tree", ".", "--runs", "0"], "'0'"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
