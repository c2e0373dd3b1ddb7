"""Every row of the fault table has a test under its number, and the page shows them."""

from __future__ import annotations

from tests.faults.table import PAGE, ROWS, by_row, written


def test_every_row_has_a_test() -> None:
    assert len(ROWS) == 35
    assert [row for row, tests in by_row().items() if not tests] == []


def test_the_page_is_fresh() -> None:
    page = PAGE.read_text()
    assert page == written(page), "python -m tests.faults.table writes it"
