"""The documents that are made from the committed data."""

from __future__ import annotations

from tests.processes import run_python


def test_the_documents_are_what_the_data_make() -> None:
    done = run_python("-m", "benchmarks.report", "--check")
    assert done.returncode == 0, done.stderr
