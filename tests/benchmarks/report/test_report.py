"""The documents that are made from the committed data."""

from __future__ import annotations

from tests import PROJECT
from tests.processes import run_python


def test_the_documents_are_what_the_data_make() -> None:
    done = run_python("-m", "benchmarks.report", "--check")
    assert done.returncode == 0, done.stderr


def test_generated_lines_of_the_readme_are_at_most_118_columns() -> None:
    text = (PROJECT / "README.md").read_text().partition("<!-- figures: speed -->")[2]
    generated = text.partition("<!-- /figures -->")[0].splitlines()
    assert max(map(len, generated)) <= 118
