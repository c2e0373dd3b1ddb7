"""A child's log, as this process shows it."""

from __future__ import annotations

import json

from neurons.embedded.log_tail import LogTail
from neurons.runtime.observe import configure


def line(event: str, **details: object) -> str:
    return json.dumps({"event": event, "level": "info", **details}) + "\n"


def test_whole_lines_are_shown_once_and_a_log_may_be_cut(tmp_path, capsys):
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
