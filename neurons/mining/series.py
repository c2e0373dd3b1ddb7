"""The miner's measurements: how they are taken, kept in a report, and taken up after a crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structlog.stdlib import BoundLogger

from harness.report import (
    Environment,
    Kind,
    Measurement,
    Report,
    ReportError,
    build_report,
    load_report,
    write_report,
)
from harness.runner import MeasurementError, probe
from harness.series import Policy, Series
from harness.source import source_digest
from harness.workload import LENGTHS, WORKLOAD, lengths_for
from neurons.configuration.settings import Settings
from neurons.errors import Held, Retry
from neurons.mining.context import Context
from neurons.mining.cycle import Submission
from neurons.processes.runtime import Stopped

CRASHES_ALLOWED = 3
REPORTS_KEPT = 200

TOO_LONG: frozenset[Kind] = frozenset({"timeout", "out_of_memory"})
"""Failures that cost a length and the longer ones their claim, and no more."""


def describe_machine(device: str, look: Callable[..., Environment] = probe) -> Environment:
    """Return the machine as a child process sees it.

    Raises:
        Held: nothing can be measured on it.
    """
    try:
        return look(device=device)
    except MeasurementError as error:
        raise Held(
            f"Nothing can be measured here: {error.reason}.",
            f"Mend what the sentence names, or change DEVICE={device}.",
        ) from error


def lengths_to_measure(target: int | None, device: str) -> tuple[int, ...]:
    """Return the lengths for a submission at `target` tokens, or for the best one.

    Raises:
        Held: the target is not measured on a CPU.
    """
    lengths = lengths_for(target or LENGTHS[-1], device)
    if target is not None and target not in lengths:
        raise Held(
            f"TARGET_SEQUENCE_LENGTH={target} cannot be measured on a CPU, and nothing is claimed "
            "that was not measured.",
            f"Use a machine with an NVIDIA GPU, or set TARGET_SEQUENCE_LENGTH to {lengths[-1]} to "
            "try the program out.",
        )
    return lengths


@dataclass(kw_only=True)
class MinerSeries(Series):
    """The measurements of one commit on one machine, on the disk after every one of them.

    `run` raises Held or Retry for what ends it, and Stopped.

    Attributes:
        path: the report.
        commit: what is measured.
        crashes: how often in a row a worker has crashed before.
    """

    path: Path
    commit: str | None
    environment: Environment
    log: BoundLogger
    crashes: int = 0

    def take_up(self, report: Report) -> bool:
        """Take over what was measured before a crash, where commit, code and machine are these."""
        code = source_digest(self.tree)
        if (
            report.commit != self.commit
            or report.environment not in (self.environment, None)
            or any(m.source_digest != code for m in report.measurements)
        ):
            return False
        here = {"environment": self.environment}
        self.measurements = [m.model_copy(update=here) for m in report.measurements]
        self.failures = list(report.failures)
        return True

    def started(self, length: int) -> None:
        self.log.info("measuring", length=length, runs=self.policy.runs)

    def measured(self, measurement: Measurement) -> None:
        self._keep()
        self.log.info(
            "measured",
            length=measurement.length,
            run=f"{len(self.of(measurement.length))}/{self.policy.runs}",
            tokens_per_sec=round(measurement.tokens_per_sec),
            vram_mb=round(measurement.vram_mb),
            first_call_seconds=round(measurement.first_call_seconds, 2),
        )

    def disturbed(self, length: int, number: int, reason: str) -> None:
        self.log.warning("sample dropped", length=length, attempt=number, reason=reason)

    def failed(self, length: int, error: MeasurementError) -> None:
        self.log.debug("the worker's last words", log=error.log_tail)
        if error.kind not in self.policy.left_out:
            raise _meaning(error, length, self.crashes) from error
        self._keep()
        self.log.warning(
            "no claim for this length and longer ones",
            length=length,
            kind=error.kind,
            reason=error.reason,
        )

    def _keep(self) -> None:
        protocol = WORKLOAD.describe(self.environment.device)
        write_report(
            self.path, build_report(protocol, self.commit, self.measurements, self.failures)
        )
        newest = sorted(self.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in newest[:-REPORTS_KEPT]:
            old.unlink()


def new_series(
    settings: Settings,
    tree: Path,
    environment: Environment,
    name: str,
    commit: str | None,
    log: BoundLogger,
    **parts: Any,
) -> MinerSeries:
    """Return an empty series as the miner takes it; `bench` takes the same.

    Args:
        name: of the report, without its ending.
        parts: what replaces the series' own `measure`, `wait`, `stop` and `crashes`.
    """
    policy = Policy(settings.claim_runs, samples=3, left_out=TOO_LONG, too_long=TOO_LONG)
    return MinerSeries(
        *(tree, policy, settings.device, settings.bench_timeout_seconds),
        path=settings.state_dir / "reports" / f"{name}.json",
        commit=commit,
        environment=environment,
        log=log,
        **parts,
    )


def _meaning(error: MeasurementError, length: int, crashes: int) -> Held | Retry | Stopped:
    """Return what the end of a series means for the submission."""
    if error.kind == "stopped":
        return Stopped("asked to stop")
    if error.kind == "gate":
        return Held(
            f"The kernels fail the correctness gate at {length} tokens: {error.reason}.",
            "Mend them (`python -m harness` shows the same); a change is picked up by itself.",
        )
    if error.kind == "import":
        return Held(f"The fork cannot be imported: {error.reason}.", error.remedy)
    if error.kind == "disturbed":
        return Held(f"{error.reason}.", "Stop what else uses the GPU, or cool it.")
    if crashes + 1 < CRASHES_ALLOWED:
        return Retry(f"The worker at {length} tokens failed: {error.reason}.")
    return Held(
        f"The worker at {length} tokens failed {CRASHES_ALLOWED} times: {error.reason}.",
        "Check the GPU with nvidia-smi and run `python -m harness` for the worker's own words.",
    )


def open_series(submission: Submission, context: Context, environment: Environment) -> MinerSeries:
    """Return the series of a submission, with what was measured before a crash."""
    commit = str(submission.commit_hash)
    series = new_series(
        *(context.settings, context.fork.worktree, environment),
        *(f"{commit}-{environment.device}-{submission.id}", commit, context.log),
        stop=context.stop,
        measure=context.measure,
        wait=context.wait,
        crashes=submission.attempts,
    )
    if series.path.exists():
        try:
            if series.take_up(load_report(series.path)):
                context.log.info("measurements kept", runs=len(series.measurements))
        except ReportError as error:
            context.log.warning("measuring again", reason=str(error))
    return series


def load_runs(submission: Submission, context: Context) -> dict[int, list[Measurement]] | None:
    """Return the measurements of a MEASURED submission by length; None when they are gone."""
    path = context.settings.state_dir / str(submission.report)
    try:
        report = load_report(path)
    except ReportError as error:
        context.log.warning("the report cannot be used", reason=str(error))
        return None
    return report.by_length() if report.commit == submission.commit_hash else None
