"""The page of other forks and their rows in README.md, from a made-up run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.rivals import OURS
from benchmarks.engine.results import Entry, write
from benchmarks.report import rivals
from tests.benchmarks.runs import run_of


def speed(by: str, tokens_per_sec: float | None) -> Entry:
    result: Any = {"failure": "gate: replaced x"}
    if tokens_per_sec is not None:
        result = {"figures": {"tokens_per_sec": tokens_per_sec, "vram_mb": 2048.0}}
    return Entry(table="speed", of={"tokens": 1_000_000}, by=by, **result)


def check(what: str, by: str, errors: dict[str, float], **figures: float) -> Entry:
    of = {"what": what, "tokens": 1000}
    return Entry(table="checks", of=of, by=by, errors=errors, figures=figures)


RUN = run_of(
    "rivals",
    speed("slow", 1e6),
    speed("cheat", None),
    speed("fast", 60.7e6),
    speed(OURS, 190e6),
    check("operator", "fast", {"relative RMS": 0.91}, cosine=0.41),
    check("gradients", "fast", {"v": 1.0, "q": 0.5}, weights=10, without=6),
    check("operator", OURS, {"relative RMS": 0.003}, cosine=0.99999),
    check("gradients", OURS, {"v": 0.01}, weights=12, without=0),
)


@pytest.fixture
def _run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rivals, "DATA", tmp_path)
    monkeypatch.setattr(rivals, "run_of", lambda _: RUN)
    write(tmp_path / "rivals.json", RUN)


@pytest.mark.usefixtures("_run")
def test_readme_shows_the_fastest_fork_and_the_size_of_its_error() -> None:
    *_, theirs, ours = rivals.short_table().splitlines()
    assert theirs == (
        "| fastest competitor's public fork, `fast` | 60.7 | 2.0 | 91.0% | 0.410 | 6 |"
    )
    assert ours == "| this project | 190 | 2.0 | 0.3% | 1.000 | 0 |"


@pytest.mark.usefixtures("_run")
def test_the_page_has_a_row_for_each_fork_and_each_reason() -> None:
    ((path, text),) = rivals.documents().items()
    assert path.name == "rivals.md"
    order = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert order.count("cheat") == 2, text
    assert order.index(OURS) < order.index("fast") < order.index("slow") < order.index("cheat")
    assert "\n- cheat: speed: gate: replaced x\n" in text
    assert "| fast | 9.10e-01 | 0.4100 | - | - | 10 | 6 | 1.00e+00 |" in text


@pytest.mark.parametrize(
    "run", [run_of("rivals", speed(OURS, 1e6)), run_of("rivals", speed("cheat", None))]
)
def test_a_run_without_a_timed_fork_adds_nothing_to_readme(run, monkeypatch):
    monkeypatch.setattr(rivals, "measured", lambda: True)
    monkeypatch.setattr(rivals, "run_of", lambda _: run)
    assert rivals.short_table() == ""
