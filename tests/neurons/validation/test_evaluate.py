"""From a queued submission to its verdict, with real clones and a stand-in for the harness."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from harness.runner import MeasurementError
from neurons.errors import Retry
from neurons.processes.runtime import Stopped
from neurons.protocol import QueuedSubmission
from neurons.validation import evaluate
from neurons.validation.evaluate import Evaluator
from neurons.validation.sandbox import clone
from tests.neurons.validation.samples import GATE, ForkRepository, Measured


@pytest.fixture
def submission(fork: ForkRepository) -> QueuedSubmission:
    return QueuedSubmission(
        id=1,
        miner_hotkey="5Grw",
        fork_url=fork.url,
        commit_hash=fork.git("rev-parse", "HEAD"),
        target_sequence_length=4096,
        tokens_per_sec=1000.0,
        created_at="",
    )


def evaluator(folder: Path, measured: Measured) -> Evaluator:
    return Evaluator(folder / "boxes", "cpu", 5.0, allow_file=True, measure=measured)


def test_times_the_target_and_the_short_lengths_behind_one_gate(
    tmp_path: Path, submission: QueuedSubmission
) -> None:
    measured = Measured(answers=[1100.0, 1.0, 2.0, 3.0])
    verdict = evaluator(tmp_path, measured).evaluate(submission)
    assert verdict.score == pytest.approx(1.1)
    assert measured.lengths == [4096, 2048, 1024, 512]
    assert measured.gates == [True, GATE, GATE, GATE]
    assert list((tmp_path / "boxes").iterdir()) == []


def test_a_target_among_the_short_lengths_is_timed_once(
    tmp_path: Path, submission: QueuedSubmission
) -> None:
    measured = Measured(answers=[1.0, 1.0, 950.0])
    target = submission.model_copy(update={"target_sequence_length": 512})
    assert evaluator(tmp_path, measured).evaluate(target).score == pytest.approx(0.95)
    assert measured.lengths == [2048, 1024, 512]


def test_a_short_fall_is_measured_a_second_time(
    tmp_path: Path, submission: QueuedSubmission
) -> None:
    measured = Measured(answers=[899.0, 1.0, 1.0, 1.0, 901.0])
    assert evaluator(tmp_path, measured).evaluate(submission).score == pytest.approx(0.901)
    measured = Measured(speed=500.0)
    verdict = evaluator(tmp_path, measured).evaluate(submission)
    assert (verdict.score, verdict.actual) == (0.0, 500.0)
    assert measured.lengths == [4096, 2048, 1024, 512, 4096]


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("gate", 1),
        ("timeout", 1),
        ("protocol", 1),
        ("import", 1),
        ("crash", 2),
        ("out_of_memory", 2),
    ],
)
def test_a_failed_measurement_scores_nothing(
    tmp_path: Path, submission: QueuedSubmission, kind: str, calls: int
) -> None:
    failure = MeasurementError("so it was", kind, remedy="Do.")  # type: ignore[arg-type]
    measured = Measured(answers=[failure, failure])
    verdict = evaluator(tmp_path, measured).evaluate(submission)
    assert verdict.score == 0.0
    assert verdict.reason == f"No measurement ({kind}): so it was"
    assert len(measured.lengths) == calls


def test_a_worker_that_died_once_is_forgiven(tmp_path: Path, submission: QueuedSubmission) -> None:
    measured = Measured(answers=[MeasurementError("died", "crash")])
    assert evaluator(tmp_path, measured).evaluate(submission).score == 1.0


def test_a_broken_rule_is_not_measured(
    tmp_path: Path, submission: QueuedSubmission, fork: ForkRepository
) -> None:
    commit = fork.commit({"fla/ops/quasar/gate.py": "# from fla.ops.gla\n"})
    measured = Measured()
    broken = submission.model_copy(update={"commit_hash": commit})
    verdict = evaluator(tmp_path, measured).evaluate(broken)
    assert verdict.score == 0.0
    assert "gate.py" in verdict.reason
    assert measured.lengths == []


@pytest.mark.parametrize(
    "change",
    [
        {"fork_url": "https://127.0.0.1:1/none", "commit_hash": "HEAD"},
        {"commit_hash": "0" * 40},
        {"tokens_per_sec": float("nan")},
        {"tokens_per_sec": 0.0},
    ],
)
def test_what_cannot_be_judged_scores_nothing(
    tmp_path: Path, submission: QueuedSubmission, change: dict[str, object]
) -> None:
    measured = Measured()
    verdict = evaluator(tmp_path, measured).evaluate(submission.model_copy(update=change))
    assert verdict.score == 0.0
    assert measured.lengths == []


def test_a_passing_fault_is_tried_twice(
    tmp_path: Path, submission: QueuedSubmission, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = clone, []

    def flaky(*args: object, **options: object) -> Path:
        calls.append(args)
        if len(calls) in (1, 3, 4):
            raise Retry("git clone took longer than 120 seconds.")
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluate, "clone", flaky)
    judge = evaluator(tmp_path, Measured())
    assert judge.evaluate(submission).score == 1.0
    verdict = judge.evaluate(submission)
    assert (verdict.score, len(calls)) == (0.0, 4)
    assert "120 seconds" in verdict.reason


def test_a_stop_gives_no_verdict(tmp_path: Path, submission: QueuedSubmission) -> None:
    stop = threading.Event()
    measured = Measured(on_call=stop.set)
    judge = Evaluator(tmp_path / "boxes", "cpu", 5.0, allow_file=True, stop=stop, measure=measured)
    with pytest.raises(Stopped):
        judge.evaluate(submission)
    assert list((tmp_path / "boxes").iterdir()) == []
    with pytest.raises(Stopped):
        judge.evaluate(submission)
    assert len(measured.lengths) == 1
