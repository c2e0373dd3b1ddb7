"""The figures of the reliability page: they are those of the data, and a month is really run."""

from __future__ import annotations

from benchmarks.documents import stale
from benchmarks.reliability import documents, load, month, run_month


def test_the_page_is_fresh() -> None:
    assert stale(documents()) == []


def test_the_figures_are_those_of_the_data() -> None:
    found = load()
    assert found.month.late.cycles == found.month.cycles == 10 * found.month.early.cycles
    assert f"| {found.month.late.rss_kib / 1024:.1f} MiB |" in month(found.month)


def test_a_month_is_run_by_a_real_daemon() -> None:
    found = run_month(10)
    assert (found.early.cycles, found.late.cycles) == (1, 10)
    assert 20 * 1024 < found.late.rss_kib < 200 * 1024  # a process with a daemon in it
    assert found.commit is not None
