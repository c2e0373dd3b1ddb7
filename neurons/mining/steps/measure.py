"""PUBLISHED to MEASURED: times the fork's commit in children and keeps the report."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report import (
    Environment,
    Failure,
    GateResult,
    Measurement,
)
from harness.runner import MeasurementError
from harness.stats import rejection
from harness.workload import LENGTHS, lengths_for
from neurons.errors import Held, Retry
from neurons.mining.context import Context
from neurons.mining.cycle import State, Submission
from neurons.mining.series import Series, open_series
from neurons.processes.runtime import Stopped

CRASHES_ALLOWED = 3
DISTURBED_ALLOWED = 3
COOLING_SECONDS = 30.0


def run(submission: Submission, context: Context) -> Submission:
    """Measure every length, each in CLAIM_RUNS cold processes.

    What a run before a crash has already measured is taken from its report when the report's
    digest, commit and code match and the machine is the same.
    """
    if not context.lays_out(submission):
        return context.move(submission, State.NEW)
    environment = _probe(context)
    target = LENGTHS[-1] if submission.auto_target else submission.target_sequence_length
    lengths = lengths_for(target, environment.device)
    if target not in lengths and not submission.auto_target:
        raise Held(
            f"TARGET_SEQUENCE_LENGTH={target} cannot be measured on a CPU, and nothing is claimed "
            "that was not measured.",
            f"Use a machine with an NVIDIA GPU, or set TARGET_SEQUENCE_LENGTH to {lengths[-1]} to "
            "try the program out.",
        )
    series = open_series(submission, context, environment)
    for length in lengths:
        if not _measure_length(submission, context, series, length):
            break
    return context.move(
        submission, State.MEASURED, report=str(series.path.relative_to(context.settings.state_dir))
    )


def _probe(context: Context) -> Environment:
    try:
        return context.probe(device=context.settings.device)
    except MeasurementError as error:
        raise Held(
            f"Nothing can be measured here: {error.reason}.",
            f"Mend what the sentence names, or change DEVICE={context.settings.device}.",
        ) from error


def _measure_length(submission: Submission, context: Context, series: Series, length: int) -> bool:
    """Bring one length to its runs; False when it is beyond this machine, as longer ones are."""
    if any(failure.length == length for failure in series.failures):
        return False
    runs = context.settings.claim_runs
    if len(series.of(length)) < runs:
        context.log.info("measuring", length=length, runs=runs)
    while len(series.of(length)) < runs:
        try:
            measurement = _undisturbed(context, length, series.of(length))
        except MeasurementError as error:
            context.log.debug("the worker's last words", log=error.log_tail)
            _explain(error, submission, length)
            context.log.warning(
                "no claim for this length and longer ones",
                length=length,
                kind=error.kind,
                reason=error.reason,
            )
            failure = Failure(length=length, kind=error.kind, reason=error.reason)
            series.add(failure=failure)
            return False
        series.add(measurement=measurement)
        context.log.info(
            "measured",
            length=length,
            run=f"{len(series.of(length))}/{runs}",
            tokens_per_sec=round(measurement.tokens_per_sec),
            vram_mb=round(measurement.vram_mb),
            first_call_seconds=round(measurement.first_call_seconds, 2),
        )
    return True


def _explain(error: MeasurementError, submission: Submission, length: int) -> None:
    """Raise what a failed measurement means, unless it only means that the length is too long."""
    if error.kind == "stopped":
        raise Stopped("asked to stop") from None
    if error.kind == "gate":
        raise Held(
            f"The kernels fail the correctness gate at {length} tokens: {error.reason}.",
            "Mend them (`python -m harness` shows the same); a change is picked up by itself.",
        ) from error
    if error.kind == "import":
        what, remedy = error.told()
        raise Held(f"The fork cannot be imported: {what}.", f"{remedy}.") from error
    if error.kind in ("crash", "protocol"):
        if submission.attempts + 1 < CRASHES_ALLOWED:
            raise Retry(f"The worker at {length} tokens failed: {error.reason}.") from error
        raise Held(
            f"The worker at {length} tokens failed {CRASHES_ALLOWED} times: {error.reason}.",
            "Check the GPU with nvidia-smi and run `python -m harness` for the worker's own words.",
        ) from error


def _undisturbed(context: Context, length: int, earlier: Sequence[Measurement]) -> Measurement:
    """Return a sample that counts; a disturbed one is dropped, and after a pause taken again."""
    gate: bool | GateResult = next((m.gate for m in earlier if m.gate), True)
    for attempt in range(1, DISTURBED_ALLOWED + 1):
        measurement = context.measure(
            context.fork.worktree,
            length,
            device=context.settings.device,
            gate=gate,
            timeout=context.settings.bench_timeout_seconds,
            stop=context.stop,
        )
        disturbance = rejection(measurement)
        if disturbance is None:
            return measurement
        context.log.warning("sample dropped", length=length, attempt=attempt, reason=disturbance)
        if attempt < DISTURBED_ALLOWED:
            context.wait(COOLING_SECONDS)
    raise Held(
        f"{DISTURBED_ALLOWED} samples at {length} tokens were disturbed: {disturbance}.",
        "Stop what else uses the GPU, or cool it.",
    )
