"""Evaluations of submissions, with real clones and fake measurements."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.measuring.runner import MeasurementError
from neurons.runtime.errors import Postponed, Retry
from neurons.runtime.process import Stopped
from neurons.validator import evaluate as module
from neurons.validator.clone import Sources
from neurons.validator.evaluate import Evaluator
from neurons.validator.verdict import Verdict
from neurons.wire.protocol import QueuedSubmission
from tests.neurons.validator.samples import Measured

Evaluate = Callable[..., Verdict]


@pytest.fixture
def measured() -> Measured:
    return Measured()


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    return tmp_path / "boxes"


class Machine:
    """A fake control run."""

    def __init__(self) -> None:
        self.sound = True

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.sound:
            raise MeasurementError("no GPU", "crash")
        return {}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(module, "call", machine)
    return machine


@pytest.fixture
def evaluate(
    boxes: Path, measured: Measured, submission: QueuedSubmission, monkeypatch: pytest.MonkeyPatch
) -> Evaluate:
    """A function that evaluates the submission with changes; no worker checks the rules."""
    monkeypatch.setattr(Evaluator, "_broken_rules", lambda *_: [])

    def judge(
        stop: threading.Event | None = None, share: float = 1.0, **changes: object
    ) -> Verdict:
        options = {
            "sources": Sources(files=True),
            "stop": stop or threading.Event(),
            "measure": measured,
            "check": measured.check,
        }
        judge = Evaluator(boxes, "cpu", 5.0, **options)  # type: ignore[arg-type]
        return judge.evaluate(submission.model_copy(update=changes), share)

    return judge


def test_one_check_precedes_the_timing_of_all_lengths(evaluate, measured, boxes):
    measured.answers = [1100.0, 1.0, 2.0, 3.0]
    verdict = evaluate()
    assert verdict.score == pytest.approx(1.1)
    speeds = {length: row["tokens_per_sec"] for length, row in verdict.measured.items()}
    assert speeds == {"512": 3.0, "1024": 2.0, "2048": 1.0, "4096": 1100.0}
    assert (measured.lengths, measured.checks) == ([4096, 2048, 1024, 512], [4096])
    assert measured.proven == [True] * 4  # by the referee's clock
    assert list(boxes.iterdir()) == []
    measured.answers, measured.lengths = [1.0, 1.0, 950.0], []
    assert evaluate(target_sequence_length=512).score == pytest.approx(0.95)
    assert measured.lengths == [2048, 1024, 512]


def test_a_target_below_the_claim_is_measured_again(evaluate: Evaluate, measured: Measured) -> None:
    measured.answers, measured.speed = [899.0, 1.0, 1.0, 1.0, 901.0], 500.0
    verdict = evaluate()
    assert verdict.score == pytest.approx(0.901)
    assert verdict.measured["4096"]["tokens_per_sec"] == 901.0  # the score's own sample
    verdict = evaluate()
    assert (verdict.score, verdict.actual) == (0.0, 500.0)
    assert measured.lengths == [4096, 2048, 1024, 512, 4096] * 2


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        *(("gate", 1), ("timeout", 1), ("protocol", 1), ("import", 1), ("limit", 1)),
        *(("crash", 2), ("out_of_memory", 2)),
    ],
)
@pytest.mark.parametrize("sound", [True, False])
def test_a_failed_measurement_counts_only_on_a_sound_machine(
    *, sound: bool, evaluate: Evaluate, measured: Measured, kind: Any, calls: int, machine: Machine
) -> None:
    machine.sound = sound
    measured.answers = [MeasurementError("so it was", kind, remedy="Do.")] * 2
    if not sound and kind != "gate":
        with pytest.raises(Postponed, match="control run failed on this machine: no GPU"):
            evaluate()
    else:
        verdict = evaluate()
        assert verdict.score == 0.0
        assert verdict.reason == f"No measurement ({kind}): so it was"
        assert verdict.timed_out == (kind == "timeout")
    assert len(measured.lengths) == calls


def test_a_crash_is_repeated_once_and_earlier_samples_are_kept(evaluate, measured, machine):
    measured.answers = [MeasurementError("died", "crash")]
    assert evaluate().score == 1.0
    measured.answers = [1000.0, 7.0, MeasurementError("too slow", "timeout")]
    verdict = evaluate()
    assert (verdict.score, list(verdict.measured)) == (0.0, ["2048", "4096"])


def test_the_end_of_a_low_claims_time_postpones_and_other_failures_count(
    evaluate: Evaluate, measured: Measured, machine: Machine
) -> None:
    machine.sound = False  # no control run is needed to postpone
    with pytest.raises(Postponed, match=r"The claim is too low .* had only 1e-08 s"):
        evaluate(share=1e-9)
    assert measured.lengths == []
    machine.sound = True
    measured.answers = [MeasurementError("not done within 5 s", "timeout")]
    assert evaluate(share=0.5).reason == "No measurement (timeout): not done within 5 s"
    assert evaluate(share=0.5).passed


def test_a_broken_rule_is_not_measured(evaluate, measured, fork, monkeypatch):
    monkeypatch.undo()  # a worker checks the rules
    verdict = evaluate(commit_hash=fork.commit({"fla/ops/quasar/gate.py": "# from fla.ops.gla\n"}))
    assert verdict.score == 0.0
    assert "gate.py" in verdict.reason
    assert measured.lengths == []


@pytest.mark.parametrize(
    "change",
    [
        {"fork_url": "https://127.0.0.1:1/none", "commit_hash": "0" * 40},
        {"commit_hash": "0" * 40},
        {"tokens_per_sec": float("nan")},
        {"tokens_per_sec": 0.0},
        {"target_sequence_length": 511},
    ],
)
def test_invalid_submissions_score_0_without_a_measurement(evaluate, measured, boxes, change):
    verdict = evaluate(**change)
    assert (verdict.score, measured.lengths) == (0.0, [])
    if "tokens_per_sec" in change or "target_sequence_length" in change:
        assert not boxes.exists()  # nothing was cloned


def test_a_temporary_fault_gives_no_verdict(evaluate, monkeypatch):
    def slow(*args: object, **options: object) -> Path:
        raise Retry("git clone took longer than 120 seconds.")

    with monkeypatch.context() as patch:
        patch.setattr(module, "clone", slow)
        with pytest.raises(Postponed, match="120 seconds"):
            evaluate()
    assert evaluate().score == 1.0


def test_the_real_control_run_passes_on_this_machine(boxes: Path) -> None:
    Evaluator(boxes, "cpu", 5.0).check_machine()
    with pytest.raises(Postponed, match="no CUDA device is visible"):
        Evaluator(boxes, "cuda", 5.0).check_machine()


def test_a_stop_gives_no_verdict(evaluate: Evaluate, measured: Measured, boxes: Path) -> None:
    stop = threading.Event()
    measured.on_call = stop.set
    for _ in range(2):
        with pytest.raises(Stopped):
            evaluate(stop)
        assert list(boxes.iterdir()) == []
    assert len(measured.lengths) == 1


def test_a_submission_has_a_budget_of_time(evaluate, measured, machine, monkeypatch):
    monkeypatch.setattr(module, "BUDGET", 0.0)
    verdict = evaluate()
    assert (verdict.score, measured.lengths) == (0.0, [])
    assert "all lengths together took more than 0 s" in verdict.reason
    machine.sound = False
    with pytest.raises(Postponed, match="control run failed"):
        evaluate()
