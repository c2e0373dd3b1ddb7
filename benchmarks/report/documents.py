"""Documents from templates, and the check that they are up to date.

A page of docs/results is a Jinja template of `templates`. README.md has one generated part between
`<!-- figures: NAME -->` and `<!-- /figures -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.engine.limits import Criterion, missed
from benchmarks.engine.results import DATA, ROOT, Run, load
from benchmarks.report import markdown

RESULTS = ROOT / "docs" / "results"


def filled(path: Path, name: str, section: str) -> str:
    """Return a document's text with `section` between the marks of that name.

    Raises:
        SystemExit: the document does not have the marks once.
    """
    marks = re.compile(rf"(<!-- figures: {name} -->\n).*?(\n<!-- /figures -->)", re.DOTALL)
    text, count = marks.subn(lambda part: f"{part[1]}{section}{part[2]}", path.read_text())
    if count != 1:
        sys.exit(f"{path.name} must have <!-- figures: {name} --> once; found {count}")
    return text


@cache
def run_of(name: str) -> Run:
    """Return the run in `benchmarks/h200/NAME.json`."""
    return load(DATA / f"{name}.json")


def case_of(run: Run) -> ModuleType:
    return import_module(f"benchmarks.cases.{run.case}")


def limits_of(*runs: Run) -> list[Criterion]:
    return [criterion for run in runs for criterion in case_of(run).limits(run)]


def summary(criteria: Sequence[Criterion]) -> str:
    """Return the number of kept limits, and a line for each missed one."""
    out = missed(criteria)
    if not out:
        many = len(criteria)
        return f"All {many} limits are kept." if many > 1 else "The limit is kept."
    listed = "\n".join(f"- {line}" for line in out)
    return f"{len(out)} of {len(criteria)} limits missed:\n\n{listed}"


def page(name: str, **context: Any) -> dict[Path, str]:
    """Return the text of docs/results/NAME.md by its path.

    Raises:
        jinja2.UndefinedError: the template names a value that nothing defines.
    """
    environment = Environment(
        extensions=["jinja2.ext.do"],
        autoescape=False,  # noqa: S701 # the pages are Markdown
        keep_trailing_newline=True,
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {
        "case": case_of,
        "facts": markdown.facts,
        "limits": limits_of,
        "not_timed": markdown.not_timed,
        "run": run_of,
        "summary": summary,
        "table": markdown.columns,
    }
    return {RESULTS / f"{name}.md": environment.get_template(f"{name}.md").render(context)}


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
