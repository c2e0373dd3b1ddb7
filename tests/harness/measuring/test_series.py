"""Several lengths in a row, and the command line on top of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.__main__ import main
from harness.measuring.runner import MeasurementError
from harness.measuring.series import Policy, Series
from harness.report import Measurement, load_report
from quasar_kernels.contract import OVERLAY
from tests.harness.samples import gate_result, measurement


class Stand:
    """Stands in for the runner: notes each call, and raises what a length has left to raise."""

    def __init__(self, **failures: list[MeasurementError]) -> None:
        self.failures = {int(name[1:]): errors for name, errors in failures.items()}
        self.calls: list[tuple[Any, ...]] = []
        self.disturbed = 0

    def __call__(self, tree: Path, length: int, **options: Any) -> Measurement:
        self.calls.append((length, options["gate"], options["cold_cache"]))
        if self.failures.get(length):
            raise self.failures[length].pop(0)
        self.disturbed -= 1
        gate = gate_result(passed=False) if self.disturbed >= 0 else gate_result()
        return measurement(length, gate=gate)

    @property
    def lengths(self) -> list[int]:
        return [call[0] for call in self.calls]


def error(kind: Any, reason: str = "it failed") -> MeasurementError:
    return MeasurementError(reason, kind)


def series(tree: Path, stand: Stand, **policy: Any) -> Series:
    return Series(tree, Policy(**policy), measure=stand, wait=lambda _: None)


GREEN = gate_result()


def test_each_length_is_gated_once_and_run_in_processes_of_its_own(tmp_path: Path) -> None:
    stand = Stand()
    found = series(tmp_path, stand, runs=2, cold=(512, 1024))
    found.run([1024, 512, 512])
    assert stand.calls == [
        *((512, True, True), (512, GREEN, False)),
        *((1024, True, True), (1024, GREEN, False)),
    ]
    assert [m.length for m in found.measurements] == [512, 512, 1024, 1024]


def test_the_gate_of_the_longest_stands_for_all_where_it_comes_first(tmp_path: Path) -> None:
    stand = Stand()
    series(tmp_path, stand, longest_first=True).run([512, 2048, 1024])
    assert stand.calls == [(2048, True, False), (1024, GREEN, False), (512, GREEN, False)]


def test_a_failed_length_leaves_the_others_and_loses_its_earlier_runs(tmp_path: Path) -> None:
    stand = Stand()
    found = series(tmp_path, stand, runs=2, gated=False, left_out=frozenset({"crash"}))
    found.run([512])
    stand.failures = {1024: [error("crash", "it died")]}
    found.measurements.append(measurement(1024))  # so that its second run is the one that fails
    found.run([512, 1024, 2048])
    assert [m.length for m in found.measurements] == [512, 512, 2048, 2048]
    (failure,) = found.failures
    assert (failure.length, failure.kind, failure.reason) == (1024, "crash", "it died")
    assert all(gate is False for _, gate, _ in stand.calls)


def test_row_22_nothing_longer_than_what_ran_out_of_memory_is_tried(tmp_path: Path) -> None:
    stand = Stand(_1024=[error("out_of_memory")])
    kinds = frozenset({"out_of_memory"})
    found = series(tmp_path, stand, left_out=kinds, too_long=kinds)
    found.run([512, 1024, 2048])
    found.run([512, 1024, 2048])
    assert stand.lengths == [512, 1024]
    assert [(f.length, f.kind) for f in found.failures] == [
        *((1024, "out_of_memory"), (2048, "out_of_memory"))
    ]


def test_what_the_policy_does_not_leave_out_ends_the_series_which_goes_on_there(
    tmp_path: Path,
) -> None:
    stand = Stand(_1024=[error("import", "for one reason")])
    found = series(tmp_path, stand)
    with pytest.raises(MeasurementError, match="for one reason"):
        found.run([512, 1024, 2048])
    assert stand.lengths == [512, 1024]
    found.run([512, 1024, 2048])
    assert stand.lengths == [512, 1024, 1024, 2048]


def test_a_process_is_started_a_second_time_and_no_third(tmp_path: Path) -> None:
    stand = Stand(_512=[error("crash")], _1024=[error("crash"), error("crash")])
    found = series(tmp_path, stand, repeated=frozenset({"crash"}))
    with pytest.raises(MeasurementError):
        found.run([512, 1024])
    assert stand.lengths == [512, 512, 1024, 1024]


def test_a_sample_that_does_not_count_is_taken_again(tmp_path: Path) -> None:
    stand = Stand()
    stand.disturbed = 2
    found = series(tmp_path, stand, samples=3)
    found.run([512])
    assert stand.lengths == [512] * 3
    assert [m.gate for m in found.measurements] == [GREEN]
    stand.disturbed = 3
    with pytest.raises(MeasurementError, match="3 samples at 1024 tokens") as caught:
        found.run([1024])
    assert caught.value.kind == "disturbed"


def test_no_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="runs 0"):
        Policy(runs=0)


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


def test_a_tree_that_breaks_the_rules_is_said_to(
    make_tree: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures are real; a validator would never have taken them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--tree", str(make_tree()), "--lengths", "16", "--runs", "1", "--device", "cpu"]
    assert main(words) == 1
    printed = capsys.readouterr()
    assert "gate green" in printed.err
    assert "A VALIDATOR REJECTS THIS TREE by its rules: fla/ops/quasar/gate.py" in printed.out


def test_a_fault_of_the_tree_is_told_once(
    make_tree: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree()
    (tree / "fla/layers/quasar.py").write_text("raise ValueError('boom')\n")
    words = ["--tree", str(tree), "--lengths", "16,32", "--runs", "1", "--device", "cpu"]
    assert main(words) == 1
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    assert printed.err.count("ValueError: boom. --debug shows the worker's log.") == 1
    assert printed.out.count("ValueError: boom") == 1
    assert "16, 32 crash: ValueError: boom" in printed.out
    assert main([*words, "--debug"]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("Traceback") == 1
    assert main(["--tree", str(tree / "none")]) == 1
    told = capsys.readouterr()
    assert told.out + told.err == (
        f"{tree}/none has no fla/ops/quasar/chunk.py. Name the root of a fork, or an overlay such "
        "as quasar_kernels/overlay.\n"
    )


@pytest.mark.slow
def test_an_overlay_is_measured_over_the_installed_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--tree", str(OVERLAY), "--lengths", "16", "--runs", "1", "--device", "cpu"]
    assert main([*words, "--ungated"]) == 0
    printed = capsys.readouterr()
    assert "16 tokens: run 1 of 1:" in printed.err
    assert "A VALIDATOR REJECTS" not in printed.out


@pytest.mark.parametrize("words", [["compare", "{tree}"], ["profile", "--tree"]])
def test_the_traceback_of_a_worker_is_for_debug(
    make_tree: Any, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    tree = str(make_tree("raise ValueError('boom')"))
    command = [*(word.format(tree=tree) for word in words), tree, "--device", "cpu"]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert "ValueError: boom. --debug shows the worker's log." in printed.err
    assert "Traceback" not in printed.err + printed.out
    assert main([*command, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_unknown_command_is_told_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compaer"])
    assert "must be one of schema, compare, history, profile, gates" in capsys.readouterr().err


def test_a_profile_of_what_is_no_fork_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["profile", "--tree", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path} has no fla/ops/quasar/chunk.py" in said


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
