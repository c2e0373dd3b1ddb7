"""A child's log, as this process shows it, and the command that shows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neurons.embedded import __main__ as program
from neurons.embedded.log_tail import LogTail
from neurons.runtime.errors import ConfigError
from neurons.runtime.observe import configure
from neurons.runtime.process import Stopped


def line(event: str, **details: object) -> str:
    return json.dumps({"event": event, "level": "info", **details}) + "\n"


def test_whole_lines_are_shown_once_and_a_log_may_be_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure()  # as the program does; otherwise the level is that of an earlier test
    file = tmp_path / "log"
    file.write_text(line("of an earlier run"))
    tail = LogTail("miner-1", file)
    first = line("measured", length=512)
    with file.open("a") as log:
        log.write(first[:20])
        log.flush()
        assert tail.show() == []
        log.write(first[20:] + "Traceback: a\n" + line("claimed") + '"text"\n')
        log.flush()
        assert [entry["event"] for entry in tail.show()] == ["measured", "claimed"]
        assert tail.show() == []
    assert tail.last == '"text"'
    file.write_text(line("new"))
    assert [entry["event"] for entry in tail.show()] == ["new"]
    written = "".join(capsys.readouterr())
    assert written.count("miner-1: measured") == 1
    assert "earlier" not in written


@pytest.mark.parametrize(
    ("words", "on_terminal", "expected"),
    [
        ((), True, True),
        ((), False, False),
        (("--serve",), False, True),
        (("--no-serve",), True, False),
    ],
)
def test_the_leaderboard_stays_on_a_terminal_or_by_a_flag(
    words: tuple[str, ...],
    on_terminal: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Fake:
        as_it_should_be = True

        def __init__(self, *_: object, serve: bool, **__: object) -> None:
            self.serve = serve

        def run(self) -> Iterator[str]:
            yield f"serve={self.serve}"

    monkeypatch.setattr(program, "Competition", Fake)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal, raising=False)
    assert program.main(list(words)) == 0
    assert f"serve={expected}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status"), [(Stopped("asked to stop"), 130), (ConfigError("Do this."), 78)]
)
def test_an_early_end_is_a_sentence_and_a_status(
    error: Exception,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(program, "Competition", fails)
    assert program.main([]) == status
    written = capsys.readouterr()
    assert "Traceback" not in written.out + written.err
    assert ("stopped" if status == 130 else "Do this.") in written.out + written.err
