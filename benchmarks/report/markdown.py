"""Markdown tables with columns that are format strings over measured entries.

A column such as "{cuda.graph_ms:ms}" formats a value of each row, and "{fla.ms/cuda.ms:.1f}" a
ratio of two. A row is anything with `get(name)`: a mapping, an entry, or a row of entries by
implementation. A dash stands for a missing value.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any

from benchmarks.engine.results import Row

WIDTH = 118
"""Columns of a paragraph."""
CELL_WORDS = 20
"""Largest number of words in a table's cell."""
SCALES = {"us": 1e3, "M": 1e-6, "G": 1e-9, "T": 1e-12, "GiB": 2**-30}
"""Factors of a value before it is formatted, as in "{bytes:GiB.2f}"; `us` is for milliseconds."""
SCALED = re.compile(rf"({'|'.join(SCALES)})(\..+)")
LABELS = {"triton": "Triton", "cuda": "CUDA", "flashqla": "FlashQLA", "flashinfer": "FlashInfer"}
"""Names of implementations for the format `label`."""


class Cells(Formatter):
    """Formats the values of one row, which is the first argument of `format`.

    Formats in addition to Python's: those of SCALES, `ms` (milliseconds), `label` (an
    implementation), and `worst` (an entry's largest error and its tensor).
    """

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:  # noqa: ARG002
        """Return a value or a ratio of a row; None if it is missing."""
        values = []
        for path in field_name.split("/"):
            value = args[0]
            for name in path.split("."):
                value = None if value is None else value.get(name)
            values.append(value)
        if None in values:
            return None, field_name
        return values[0] if len(values) == 1 else values[0] / values[1], field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or (format_spec == "worst" and not value.errors):
            return "-"
        if format_spec == "ms":
            return f"{value:.3f}" if value < 1 else f"{value:.2f}"
        if format_spec == "label":
            return LABELS.get(value, str(value))
        if format_spec == "worst":
            tensor, error = value.worst()
            return f"{error:.1e} ({tensor})"
        if scaled := SCALED.fullmatch(format_spec):
            return format(value * SCALES[scaled[1]], scaled[2])
        return format(value, format_spec)


Column = str | Callable[[Any], str]
"""A format string, or a function of a row."""


def columns(rows: Iterable[Any], by_title: Mapping[str, Column]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    format_row = Cells().format
    lines = [
        [one(row).strip() if callable(one) else format_row(one, row) for one in by_title.values()]
        for row in rows
    ]
    if not lines:
        return "Nothing was measured."
    head = [list(by_title), ["---"] + ["---:"] * (len(by_title) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *lines])


def facts(*parts: Mapping[str, Any]) -> str:
    """Return a table of names and values without a header; long values are paragraphs after it."""
    values = {name: str(value) for part in parts for name, value in part.items()}
    long = {name: value for name, value in values.items() if len(value.split()) > CELL_WORDS}
    rows = [f"| {name} | {value} |" for name, value in values.items() if name not in long]
    table = "\n".join(["| | |", "|---|---|", *rows])
    paragraphs = [
        textwrap.fill(f"{name.capitalize()}: {value}", WIDTH, break_on_hyphens=False)
        for name, value in long.items()
    ]
    return "\n\n".join([table, *paragraphs])


def not_timed(rows: Iterable[Row], call_name: Callable[[Row], str]) -> str:
    """Return a paragraph of the failed calls by reason; an empty text without failures."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        for name, why in row.failures():
            what = f"{LABELS.get(name, name)}, {call_name(row)}"
            by_reason.setdefault(why.splitlines()[0], []).append(what)
    listed = [f"{'; '.join(names)} ({why})" for why, names in by_reason.items()]
    return f"\n\nNot timed: {'; '.join(listed)}." if listed else ""
