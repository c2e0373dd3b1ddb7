"""A Markdown table, for the scripts that write documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def records(rows: Iterable[Mapping[str, str]]) -> str:
    """Return the Markdown table of rows that name their cells; all have the first one's columns."""
    listed = list(rows)
    return table(list(listed[0]), [[row[name] for name in listed[0]] for row in listed])


def milliseconds(value: float | None) -> str:
    """Write a time as a table shows it, or that there is none."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def facts(rows: dict[str, str]) -> str:
    """Return a Markdown table of two columns without a header: what, and its value."""
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())])


def not_timed(failures: Iterable[tuple[str, str]]) -> str:
    """Return a paragraph that names what was not timed, and why; nothing where all was.

    Args:
        failures: what, and what its failure said; what failed alike is told with one reason.
    """
    by_reason: dict[str, list[str]] = {}
    for what, why in failures:
        by_reason.setdefault(why.splitlines()[0], []).append(what)
    listed = [f"{'; '.join(names)} ({why})" for why, names in by_reason.items()]
    return f"\n\nNot timed: {'; '.join(listed)}." if listed else ""
