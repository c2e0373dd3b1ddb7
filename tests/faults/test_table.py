"""Every row of the fault table in docs/reliability.md has tests with its number."""

from __future__ import annotations

import re

from tests import PROJECT


def test_rows_and_numbered_tests_match() -> None:
    page = (PROJECT / "docs/reliability.md").read_text()
    rows = re.findall(r"^\| (\d\d) \|", page, re.M)
    tested = {
        row
        for file in (PROJECT / "tests").rglob("test_*.py")
        for row in re.findall(r"^def test_row_(\d\d)_", file.read_text(), re.M)
    }
    assert rows == [f"{row:02}" for row in range(1, 36)]
    assert tested == set(rows)
