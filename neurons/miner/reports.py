"""The reports in the state folder: a submission's own, and earlier ones of the same kernels."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

from harness.claim import RUNS_MOST
from harness.claim.rejection import accepted
from harness.measuring.together import FIRST_RUNS
from harness.report import Environment, Measurement, Report, ReportError, load_report
from harness.workload import VALIDATOR_LENGTHS
from neurons.miner.context import Context
from neurons.miner.cycle import Submission

LASTS = timedelta(days=14)
"""How long measurements stand: drivers and packages are compared, dust in a fan is not."""

LOOKED_AT = 20
"""Newest reports among which earlier measurements are looked for."""


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
    return report.by_length()


def earlier_runs(
    folder: Path, environment: Environment, code: str, target: int
) -> list[Measurement]:
    """Return the accepted runs of the newest report from which the same claim could be derived.

    Args:
        folder: of the reports.
        environment, code: the machine and the source digest that the report must be of.

    Returns:
        Runs of the target, the newest of them, and of the lengths beside it; none where no report
        of the last two weeks has enough.
    """
    newest = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest[:LOOKED_AT]:
        try:
            report = load_report(path)
        except ReportError:
            continue
        runs = _usable(report, environment, code)
        beside = [run for length in VALIDATOR_LENGTHS for run in runs.get(length, ())]
        if len(runs.get(target, ())) >= FIRST_RUNS and {*VALIDATOR_LENGTHS} <= set(runs):
            # one place is left for the run that confirms them
            kept = runs[target][1 - RUNS_MOST :]
            return [run for run in beside if run.length != target] + kept
    return []


def _usable(report: Report, environment: Environment, code: str) -> dict[int, list[Measurement]]:
    if report.environment != environment:
        return {}
    since = datetime.now(timezone.utc) - LASTS
    return {
        length: [run for run in accepted(runs) if run.source_digest == code]
        for length, runs in report.by_length().items()
        if all(run.started_at >= since for run in runs)
    }
