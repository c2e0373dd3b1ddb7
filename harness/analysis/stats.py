"""The samples of each length as a table, for a terminal, a log or a page."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, TextIO

from harness.claim.rejection import rejection
from harness.hardware.roofline import hardware_bound
from harness.sample import Failure, Sample
from harness.terminal import printable

if TYPE_CHECKING:
    from rich.table import Table

HEADER = (
    *("tokens", "runs", "slowest tokens/s", "median", "spread", "of bound", "cold / loop"),
    *("MiB", "first call", "note"),
)
"""Columns of the table. `of bound` is the median over the hardware bound; `cold / loop` is the time
of a single call with a cold L2, by CUDA events, over that of a call in the loop."""


def spread(values: Sequence[float]) -> float:
    """Return (max - min) / min of positive values; 0 for a single one.

    Raises:
        ValueError: no values, or one that is not a positive finite number.
    """
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"spread needs positive finite values, not {list(values)}")
    return (max(values) - min(values)) / min(values)


def agreement(sample: Sample) -> float | None:
    """Return a single cold call's seconds over those of a call in the loop, where it was timed.

    About 1 where the GPU is the limit, below where calls wait for the host.
    """
    if not sample.call_seconds:
        return None
    return median(sample.call_seconds) * sample.runs / sample.elapsed_seconds


def rows(samples: Sequence[Sample]) -> list[tuple[str, ...]]:
    """Return the cells of each length, under HEADER; a dash marks an unknown figure."""
    return [
        _row([one for one in samples if one.length == length])
        for length in sorted({one.length for one in samples})
    ]


def _row(runs: Sequence[Sample]) -> tuple[str, ...]:
    speeds = [run.tokens_per_sec for run in runs]
    bound = hardware_bound(runs[0].environment)
    ratios = [ratio for run in runs if (ratio := agreement(run)) is not None]
    notes = sorted({reason for run in runs if (reason := rejection(run))})
    return (
        f"{runs[0].length:,}",
        f"{len(runs)}",
        f"{min(speeds):,.0f}",
        f"{median(speeds):,.0f}",
        f"{spread(speeds):.1%}",
        f"{median(speeds) / bound:.0%}" if bound else "-",
        f"{median(ratios):.2f}" if ratios else "-",
        f"{max(run.vram_mb for run in runs):,.0f}",
        f"{max(run.first_call_seconds for run in runs):.2f} s",
        "; ".join(notes) or "checked",
    )


def failure_lines(failures: Iterable[Failure]) -> list[str]:
    """Return a line for each reason of failures, with the lengths that share it."""
    alike: dict[str, list[int]] = {}
    for failure in failures:
        alike.setdefault(f"{failure.kind}: {printable(failure.reason)}", []).append(failure.length)
    return [
        f"{', '.join(map(str, sorted(lengths))):>9} {reason}" for reason, lengths in alike.items()
    ]


def table(samples: Sequence[Sample], failures: Iterable[Failure] = ()) -> str:
    """Return a line for each length, for a log or a file."""
    cells = [HEADER, *rows(samples)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER) - 1)]
    lines = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in cells
    ]
    return "\n".join([*lines, *failure_lines(failures)])


def markdown(samples: Sequence[Sample], failures: Iterable[Failure] = ()) -> str:
    """Return the same as a Markdown table, failures as a list below it."""
    cells = [HEADER, ("---:",) * (len(HEADER) - 1) + ("---",), *rows(samples)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    items = [f"- {line.strip()}" for line in failure_lines(failures)]
    return "\n".join([*lines, *([""] if items else []), *items]) + "\n"


def rich_table(samples: Sequence[Sample], failures: Iterable[Failure] = ()) -> Table:
    """Return the same for a terminal; lengths with rejected samples are red."""
    from rich.table import Table
    from rich.text import Text  # a str would be read as markup

    caption = "\n".join(failure_lines(failures))
    made = Table(caption=Text(caption) if caption else None, caption_style="red")
    for name in HEADER:
        made.add_column(name, justify="left" if name == "note" else "right", overflow="fold")
    for row in rows(samples):
        made.add_row(*map(Text, row), style=None if row[-1] == "checked" else "red")
    return made


def show_table(
    samples: Sequence[Sample],
    failures: Iterable[Failure] = (),
    stream: TextIO | None = None,
) -> None:
    """Print the table: in colours on a terminal, else as plain lines."""
    stream = stream or sys.stdout
    if stream.isatty():
        from rich.console import Console

        Console(file=stream).print(rich_table(samples, failures))
    else:
        stream.write(table(samples, failures) + "\n")
        stream.flush()
