"""The documents that are made from the committed data."""

from __future__ import annotations

import re

import pytest

from benchmarks.engine.results import Run
from benchmarks.report import documents
from benchmarks.report.documents import page
from benchmarks.report.markdown import Column, columns
from tests.benchmarks.runs import changed
from tests.processes import run_python


def test_the_documents_are_what_the_data_make() -> None:
    done = run_python("-m", "benchmarks.report", "--check")
    assert done.returncode == 0, done.stderr


def test_failures_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    load = documents.run_of

    def run_of(name: str) -> Run:
        run = load(name)
        if name == "gpu-tests":
            run = changed(run, "files", "failure", "test_wrong", file="test_backend.py")
            return changed(run, "settings", "left out", "test_last.py")
        if name == "sanitizer":
            return changed(run, "tools", "failure", "layer was cut off", by="memcheck")
        if name == "operator":
            return changed(run, "first call", "figures/call_seconds", 8.1, by="cuda")
        return run

    monkeypatch.setattr(documents, "run_of", run_of)
    (text,) = page("kernels").values()
    assert "Failed: test_backend.py: test_wrong." in text
    assert "Not part of this run: test_last.py." in text
    assert re.search(r"\n\| memcheck \| [^|]* \| layer was cut off \|", text), text
    assert "1 of 139 limits are missed:\n\n- first call, cuda, s: 8.1, limit 8" in text


def test_columns_format_values_ratios_and_missing_values() -> None:
    rows = [{"tokens": 2048, "a": {"ms": 0.5}, "b": {"ms": 2.0}}, {"tokens": 9, "a": {"ms": 3e3}}]
    by_title: dict[str, Column] = {
        "tokens": "{tokens:,}",
        "a": "{a.ms:ms}",
        "b": "{b.ms:us.0f} us",
        "b / a": "{b.ms/a.ms:.1f}",
        "more": lambda row: str(len(row)),
    }
    assert columns(rows, by_title).splitlines()[2:] == [
        "| 2,048 | 0.500 | 2000 us | 4.0 | 3 |",
        "| 9 | 3000.00 | - us | - | 2 |",
    ]
