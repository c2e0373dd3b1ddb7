"""Markdown tables and their cells, for documents that are generated from data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.engine.results import Entry


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def records(rows: Iterable[Mapping[str, str]]) -> str:
    """Return the table of rows whose keys are the columns; all have the first row's columns."""
    listed = list(rows)
    if not listed:
        return "Nothing was measured."
    return table(list(listed[0]), [[row[name] for name in listed[0]] for row in listed])


def facts(rows: Mapping[str, str]) -> str:
    """Return a table without a header, with names in one column and values in the other."""
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())])


def milliseconds(value: float | None) -> str:
    """Return milliseconds as text; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def microseconds(value: float | None, digits: int = 2) -> str:
    """Return milliseconds in microseconds; a dash for None."""
    return "-" if value is None else f"{value * 1e3:.{digits}f}"


def times(value: float | None, digits: int = 1) -> str:
    """Return a ratio; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """Return a percentage; a dash for None."""
    return "-" if value is None else f"{value:.0%}"


def gib(value: float | None) -> str:
    """Return bytes in GiB; a dash for None."""
    return "-" if value is None else f"{value / 2**30:.2f}"


def worst(entry: Entry | None) -> str:
    """Return an entry's largest error and its tensor; a dash for None."""
    if entry is None or not entry.errors:
        return "-"
    tensor, error = entry.worst()
    return f"{error:.1e} ({tensor})"


def not_timed(failures: Iterable[tuple[str, str]]) -> str:
    """Return a paragraph of the failed calls by reason; an empty text without failures.

    Args:
        failures: the call's name, and its error.
    """
    by_reason: dict[str, list[str]] = {}
    for what, why in failures:
        by_reason.setdefault(why.splitlines()[0], []).append(what)
    listed = [f"{'; '.join(names)} ({why})" for why, names in by_reason.items()]
    return f"\n\nNot timed: {'; '.join(listed)}." if listed else ""
