"""Finds samples of the same kernels in earlier reports of the state folder."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

from harness.claim import RUNS_MOST
from harness.claim.rejection import accepted
from harness.hardware.machine import Environment
from harness.measuring.plan import FIRST_RUNS
from harness.report import Report, ReportError, load_report
from harness.sample import Sample
from harness.workload import VALIDATOR_LENGTHS

VALID_FOR = timedelta(days=14)
"""Age at which samples expire: hardware drifts in ways that the environment does not show."""

REPORTS_SEARCHED = 20
"""Number of the newest reports that are searched."""


def earlier_samples(folder: Path, environment: Environment, code: str, target: int) -> list[Sample]:
    """Return accepted samples of an earlier measurement of this code on this machine.

    They come from the newest valid report with samples of every length that validators time and
    FIRST_RUNS samples of the target. Without such a report the list is empty.
    """
    newest = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest[:REPORTS_SEARCHED]:
        try:
            report = load_report(path)
        except ReportError:
            continue
        usable = _usable(report, environment, code)
        if len(usable.get(target, ())) >= FIRST_RUNS and {*VALIDATOR_LENGTHS} <= set(usable):
            others = [one for n in VALIDATOR_LENGTHS if n != target for one in usable[n]]
            # the sample that confirms them is the last of at most RUNS_MOST
            return others + usable[target][1 - RUNS_MOST :]
    return []


def _usable(report: Report, environment: Environment, code: str) -> dict[int, list[Sample]]:
    if report.environment != environment:
        return {}
    since = datetime.now(timezone.utc) - VALID_FOR
    return {
        length: [sample for sample in accepted(samples) if sample.source_digest == code]
        for length, samples in report.by_length().items()
        if all(sample.started_at >= since for sample in samples)
    }
