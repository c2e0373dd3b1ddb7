"""The documents that are generated from the committed data."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.results import Run
from benchmarks.report import documents
from benchmarks.report.__main__ import documents as make_documents
from benchmarks.report.documents import page
from tests.benchmarks.runs import changed


def test_the_documents_are_up_to_date() -> None:
    documents.update(make_documents(), check=True)


@pytest.mark.parametrize("path", sorted(documents.RESULTS.glob("*.md")), ids=lambda path: path.name)
def test_a_page_and_its_cells_are_short(path: Path) -> None:
    text = path.read_text()
    words = [word for word in text.split() if word.strip("|-:")]
    assert len(words) <= 1500
    cells = [cell for line in text.splitlines() if line[:1] == "|" for cell in line.split("|")]
    assert max((len(cell.split()) for cell in cells), default=0) <= 20


def test_failures_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    load = documents.run_of

    def run_of(name: str) -> Run:
        run = load(name)
        if name == "operator":
            return changed(run, "forgetting", "errors/o", 0.5)
        return run

    monkeypatch.setattr(documents, "run_of", run_of)
    (text,) = page("kernels").values()
    assert "1 of 137 limits missed:\n\n- error of 200000 tokens, 0 slow heads: 0.5" in text
