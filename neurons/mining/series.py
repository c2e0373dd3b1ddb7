"""The measurements of a submission: kept in its report, taken up again after a crash."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from harness.report import (
    Environment,
    Failure,
    Measurement,
    ReportError,
    build_report,
    load_report,
    write_report,
)
from harness.source import source_digest
from harness.workload import WORKLOAD
from neurons.mining.context import Context
from neurons.mining.cycle import Submission

REPORTS_KEPT = 200


@dataclass
class Series:
    """The measurements of one commit on one machine, on the disk after every one of them."""

    path: Path
    commit: str
    environment: Environment
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def of(self, length: int) -> list[Measurement]:
        """Return the accepted runs of one length."""
        return [m for m in self.measurements if m.length == length]

    def add(
        self, *, measurement: Measurement | None = None, failure: Failure | None = None
    ) -> None:
        """Add a run or a failure, and write the report."""
        self.measurements += [measurement] if measurement else []
        self.failures += [failure] if failure else []
        protocol = WORKLOAD.describe(self.environment.device)
        report = build_report(protocol, self.commit, self.measurements, self.failures)
        write_report(self.path, report)
        newest = sorted(self.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in newest[:-REPORTS_KEPT]:
            old.unlink()


def open_series(submission: Submission, context: Context, environment: Environment) -> Series:
    """Return the series of a submission, with what was measured before a crash.

    A report counts when its digest, commit and code match and the machine is the same.
    """
    commit = str(submission.commit_hash)
    path = context.reports / f"{commit}-{environment.device}-{submission.id}.json"
    series = Series(path, commit, environment)
    if not path.exists():
        return series
    try:
        report = load_report(path)
    except ReportError as error:
        context.log.warning("measuring again", reason=str(error))
        return series
    code = source_digest(context.fork.worktree)
    if (
        report.commit == commit
        and report.environment in (environment, None)
        and all(m.source_digest == code for m in report.measurements)
    ):
        series.measurements = [
            m.model_copy(update={"environment": environment}) for m in report.measurements
        ]
        series.failures = list(report.failures)
        context.log.info("measurements kept", runs=len(series.measurements))
    return series


def load_runs(submission: Submission, context: Context) -> dict[int, list[Measurement]] | None:
    """Return the measurements of a MEASURED submission by length; None when they are gone."""
    path = context.settings.state_dir / str(submission.report)
    try:
        report = load_report(path)
    except ReportError as error:
        context.log.warning("the report cannot be used", reason=str(error))
        return None
    if report.commit != submission.commit_hash:
        return None
    runs: dict[int, list[Measurement]] = {}
    for measurement in report.measurements:
        runs.setdefault(measurement.length, []).append(measurement)
    return runs
