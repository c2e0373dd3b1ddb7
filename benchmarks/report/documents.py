"""Documents with generated parts between marks, and the check that these are up to date.

A part begins with `<!-- figures: NAME -->` and ends with `<!-- /figures -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template

from benchmarks.engine.results import ROOT

RESULTS = ROOT / "docs" / "results"
TEMPLATES = ROOT / "benchmarks" / "report" / "templates"
WIDTH = 118
"""Columns of a paragraph."""
MARKS = re.compile(r"<!-- figures: (\w+) -->\n.*?<!-- /figures -->", re.DOTALL)


def filled(path: Path, text: str, sections: Mapping[str, str]) -> str:
    """Return the text of the document `path` with every part between its marks filled in.

    Raises:
        SystemExit: the document lacks a section's marks, or has marks without a section.
    """
    marks = MARKS.findall(text)
    if sorted(marks) != sorted(sections):
        sys.exit(f"{path.name} must have the marks {sorted(sections)} once; found {marks}")
    return MARKS.sub(
        lambda part: f"<!-- figures: {part[1]} -->\n{sections[part[1]]}\n<!-- /figures -->", text
    )


def page(name: str, sections: Mapping[str, str]) -> dict[Path, str]:
    """Return the text of docs/results/NAME.md by its path: its template with every section.

    Raises:
        KeyError: `sections` lacks a section of the template.
    """
    text = (TEMPLATES / f"{name}.md").read_text(encoding="utf-8")
    return {RESULTS / f"{name}.md": Template(text).substitute(sections)}


def update(wanted: Mapping[Path, str], *, check: bool) -> None:
    """Write the stale documents, or only name them.

    Raises:
        SystemExit: with `check`, some are stale.
    """
    outdated = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    if check and outdated:
        names = ", ".join(str(path.relative_to(ROOT)) for path in outdated)
        sys.exit(f"stale: {names}; run python -m benchmarks.report")
    for path in outdated:
        path.write_text(wanted[path])
