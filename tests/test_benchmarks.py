"""The committed benchmark reports, and the documents made from them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.report import load_report
from harness.workload import LENGTHS

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "benchmarks" / "h200"


def test_the_documents_say_what_the_reports_say() -> None:
    command = [sys.executable, "scripts/report_benchmarks.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_figure_of_the_overlay_stands_behind_a_green_gate() -> None:
    report = load_report(REPORTS / "overlay.json")
    assert report.failures == ()
    assert {m.length for m in report.measurements} == set(LENGTHS)
    for measurement in report.measurements:
        assert measurement.gate is not None
        assert measurement.gate.passed
        assert measurement.gate.source_digest == measurement.source_digest


def test_both_reports_come_from_one_machine_and_commit() -> None:
    fork, ours = (load_report(REPORTS / f"{name}.json") for name in ("public-fork", "overlay"))
    assert fork.environment == ours.environment
    assert fork.commit == ours.commit
