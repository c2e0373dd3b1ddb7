"""The table of samples, and text of a fork on a terminal."""

from __future__ import annotations

import io

import pytest

from harness.analysis.stats import HEADER, agreement, rows, table
from harness.sample import Failure
from harness.terminal import Progress
from tests.harness.hardware.test_roofline import H200
from tests.harness.samples import make_sample

RUNS = [
    make_sample(512, 1000.0),
    make_sample(2048, 2000.0, correctness=None),
    make_sample(512, 1250.0, vram_mb=1500.0),
]


def test_a_row_summarises_the_samples_of_a_length() -> None:
    first, second = (dict(zip(HEADER, row, strict=True)) for row in rows(RUNS))
    assert (first["tokens"], first["runs"], first["slowest tokens/s"]) == ("512", "2", "1,000")
    assert (first["median"], first["spread"], first["MiB"]) == ("1,125", "25.0%", "1,500")
    assert (first["of bound"], first["cold / loop"], first["note"]) == ("-", "-", "checked")
    assert (second["runs"], second["median"]) == ("1", "2,000")
    assert second["note"] == "its correctness was not checked"


def test_a_row_shows_the_hardware_bound_and_the_cold_calls() -> None:
    # ten calls in 50 ms; single cold calls take 6 ms
    run = make_sample(
        1_000_000, 2e8, elapsed_seconds=0.05, call_seconds=(6e-3, 5e-3, 7e-3), environment=H200
    )
    assert agreement(run) == pytest.approx(1.2)
    row = dict(zip(HEADER, rows([run])[0], strict=True))
    assert (row["of bound"], row["cold / loop"]) == ("45%", "1.20")  # of 441 M tokens/s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


HOSTILE = "\x1b]0;owned\x07 \u202e[link=https://x.example]see[/wrong]"
"""Text with control sequences, and with markup that rich would interpret or reject."""


def test_text_of_a_fork_cannot_control_a_terminal() -> None:
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress.show(HOSTILE)
        progress.print(HOSTILE)
    failures = [Failure(length=4096, kind="crash", reason=HOSTILE)]
    for text in (terminal.getvalue(), table(RUNS, failures)):
        assert "[link=https://x.example]see[/wrong]" in text
        assert "\x1b]" not in text
        assert "\u202e" not in text
