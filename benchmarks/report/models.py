"""docs/results/models.md: costs of each mechanism, of WKV6, and what small models learn."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine.results import DATA, load
from benchmarks.report import learned, mechanisms, wkv6
from benchmarks.report.documents import page, shown

MECHANISMS = DATA / "mechanisms.json"


def documents() -> dict[Path, str]:
    """Return the page and its plots by path; no plots before the first run."""
    sections = {
        "wkv6": shown(DATA / "wkv6.json", wkv6.speeds),
        "mechanisms": shown(MECHANISMS, mechanisms.section),
        **learned.sections(),
    }
    plots = mechanisms.plots(load(MECHANISMS)) if MECHANISMS.exists() else {}
    return {**page("models", sections), **learned.plots(), **plots}
