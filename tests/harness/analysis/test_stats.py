"""How far repeated speeds spread."""

from __future__ import annotations

import io

import pytest

from harness.analysis.stats import (
    HEADER,
    agreement,
    markdown,
    rich_table,
    rows,
    show_table,
    spread,
    table,
)
from harness.sample import Failure
from harness.terminal import Progress
from tests.harness.hardware.test_roofline import H200
from tests.harness.samples import make_sample


def test_spread_is_relative_to_the_slowest() -> None:
    assert spread([100.0, 125.0, 110.0]) == pytest.approx(0.25)
    assert spread([42.0]) == 0
    assert spread([0.75, 0.5]) == 0.5
    assert spread([2.0, 7.0]) == 2.5


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, float("nan")], [-1.0]])
def test_spread_refuses_what_is_no_speed(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        spread(values)


RUNS = [
    make_sample(512, 1000.0),
    make_sample(2048, 2000.0, correctness=None),
    make_sample(512, 1250.0, vram_mb=1500.0),
]
FAILURES = [Failure(length=4096, kind="timeout", reason="not done within 300 s")]


def test_a_row_says_what_the_runs_of_a_length_say() -> None:
    first, second = (dict(zip(HEADER, row, strict=True)) for row in rows(RUNS))
    assert (first["tokens"], first["runs"], first["slowest tokens/s"]) == ("512", "2", "1,000")
    assert (first["median"], first["spread"], first["MiB"]) == ("1,125", "25.0%", "1,500")
    assert (first["of bound"], first["cold / loop"], first["note"]) == ("-", "-", "checked")
    assert (second["runs"], second["median"]) == ("1", "2,000")
    assert second["note"] == "its correctness was not checked"


def test_a_row_shows_the_hardwares_bound_and_both_clocks() -> None:
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


def test_a_terminal_and_a_file_get_the_same_figures() -> None:
    file, terminal = io.StringIO(), Terminal()
    for stream in (file, terminal):
        show_table(RUNS, FAILURES, stream)
    page = markdown(RUNS, FAILURES)
    for text in (file.getvalue(), terminal.getvalue().replace("\n", " "), page):
        assert "1,125" in text
        assert "25.0%" in text
        assert "timeout" in text
    assert file.getvalue() == table(RUNS, FAILURES) + "\n"
    assert "\x1b" not in file.getvalue()
    assert page.splitlines()[1].count("|") == len(HEADER) + 1
    assert page.endswith(" |\n\n- 4096 timeout: not done within 300 s\n")
    assert markdown(RUNS).endswith(" checked |\n")


def test_a_lines_columns_stand_below_one_another_and_its_note_comes_last() -> None:
    head, first, second, fault = table(RUNS, FAILURES).splitlines()
    assert head.endswith("  note")
    assert first.endswith("  checked")
    assert second.endswith("  its correctness was not checked")
    place = head.index("note")
    assert first[:place].rstrip().endswith(" s")  # the first call's seconds
    assert [line.index(note, place) for line, note in ((first, "checked"), (second, "its"))] == [
        place,
        place,
    ]
    assert fault == "     4096 timeout: not done within 300 s"


def test_on_a_terminal_what_does_not_count_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rich_table(RUNS)
    assert [row.style for row in made.rows] == [None, "red"]
    assert [(column.header, column.justify) for column in made.columns] == [
        (name, "left" if name == "note" else "right") for name in HEADER
    ]
    monkeypatch.setattr("harness.analysis.stats.rejection", lambda run: "another used the GPU")
    assert [row.style for row in rich_table(RUNS).rows] == ["red", "red"]


HOSTILE = "\x1b]0;owned\x07 \u202e[link=https://x.example]see[/wrong]"
"""Words of a fork that steer a terminal, and that rich takes for markup or fails at."""


def test_a_forks_words_reach_a_terminal_as_text() -> None:
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress.doing(HOSTILE)
        progress.say(HOSTILE)
    failures = [Failure(length=4096, kind="crash", reason=HOSTILE)]
    show_table(RUNS, failures, terminal)
    shown = terminal.getvalue()
    assert shown.count("[link=https://x.example]see[/wrong]") >= 3
    for text in (shown, table(RUNS, failures)):
        assert "\x1b]" not in text  # a title or a link
        assert "\u202e" not in text


def test_progress_is_live_on_a_terminal_and_lines_elsewhere() -> None:
    file, terminal = io.StringIO(), Terminal()
    for stream in (file, terminal):
        with Progress(stream) as progress:
            progress.doing("2,048 tokens: run 1")
            progress.say("a [bold] line")
    assert file.getvalue() == "a [bold] line\n"
    assert "a [bold] line" in terminal.getvalue()
    assert "2,048 tokens: run 1" in terminal.getvalue()
