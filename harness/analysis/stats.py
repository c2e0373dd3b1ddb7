"""The samples of each length as a Markdown table, for a terminal, a log or a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from harness.hardware.roofline import hardware_bound
from harness.sample import Failure, Sample, rejection
from harness.terminal import printable

HEADER = (
    *("tokens", "runs", "slowest tokens/s", "median", "spread", "of bound", "cold / loop"),
    *("MiB", "first call", "note"),
)
"""Columns of the table. `of bound` is the median divided by the hardware bound. `cold / loop` is
the time of a single call with a cold L2 (by CUDA events), divided by that of a call in the loop."""


def agreement(sample: Sample) -> float | None:
    """Return the time of a single call with a cold L2 divided by that of a call in the loop.

    None if no single calls were timed. The ratio is about 1 if the GPU limits the speed, and lower
    if calls wait for the host.
    """
    if not sample.call_seconds:
        return None
    return median(sample.call_seconds) * sample.runs / sample.elapsed_seconds


def rows(samples: Sequence[Sample]) -> list[tuple[str, ...]]:
    """Return the cells of each length, under HEADER; a dash marks an unknown figure."""
    return [
        _row([sample for sample in samples if sample.length == length])
        for length in sorted({sample.length for sample in samples})
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
        f"{(max(speeds) - min(speeds)) / min(speeds):.1%}",
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
    return [f"{', '.join(map(str, sorted(lengths)))} {reason}" for reason, lengths in alike.items()]


def table(samples: Sequence[Sample], failures: Iterable[Failure] = ()) -> str:
    """Return a Markdown table in aligned columns, a row for each length, and the failures below."""
    cells = [HEADER, *rows(samples)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER) - 1)]
    lines = [
        " | ".join(
            [*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        )
        for row in cells
    ]
    lines.insert(1, " | ".join([*("-" * (width - 1) + ":" for width in widths), "---"]))
    items = [f"- {line}" for line in failure_lines(failures)]
    return "\n".join([*(f"| {line} |" for line in lines), *[""] * bool(items), *items]) + "\n"
