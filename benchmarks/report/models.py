"""docs/results/models.md: costs of each mechanism and of WKV6, and results of small models."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine.results import DATA, load
from benchmarks.report import learned, mechanisms, wkv6
from benchmarks.report.documents import page


def documents() -> dict[Path, str]:
    """Return the page and its plots by path."""
    wkv, costs, recall, text = (
        load(DATA / f"{name}.json")
        for name in ("wkv6", "mechanisms", "learned-recall", "learned-text")
    )
    sections = {
        "wkv6": wkv6.speeds(wkv),
        "mechanisms": mechanisms.section(costs),
        "recall": learned.recall(recall),
        "text": learned.text(text),
    }
    return {
        **page("models", sections),
        **mechanisms.plots(costs),
        learned.RECALL_PLOT: learned.recall_plot(recall),
        learned.TEXT_PLOT: learned.text_plot(text),
    }
