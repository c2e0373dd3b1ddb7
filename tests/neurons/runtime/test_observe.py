"""Logs: one line per event, secrets removed everywhere, heartbeats during long work."""

import itertools
import json
import logging
import sys

import pytest
from structlog.testing import capture_logs

from neurons.runtime import observe
from neurons.runtime.heartbeat import heartbeat
from tests.processes import run_python, wait_for

CANARY = "canary-7f3a9c"


def test_console_lines(capsys: pytest.CaptureFixture[str]) -> None:
    observe.configure()
    observe.get_logger("t", hotkey="5abc").info("claim derived", length=2048, text="two words")
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.endswith('Z info     claim derived  hotkey=5abc length=2048 text="two words"\n')


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    observe.configure(fmt="json")
    observe.get_logger("t").warning("paused", seconds=3)
    event = json.loads(capsys.readouterr().err)
    assert (event["event"], event["level"], event["seconds"]) == ("paused", "warning", 3)
    assert event["timestamp"].endswith("Z")


@pytest.mark.parametrize("fmt", ["console", "json"])
def test_secrets_are_removed_everywhere(fmt: str, capsys: pytest.CaptureFixture[str]) -> None:
    observe.configure(fmt=fmt, secrets=[CANARY])
    log = observe.get_logger("t")
    log.info(f"pushed with {CANARY}", url=f"https://x:{CANARY}@h", deep={"a": [CANARY]})
    log.info(
        "headers", headers={"Signature": "abc1", "Authorization": "abc2"}, commitment_salt="abc3"
    )
    log.info("shapes", text="ghp_" + "A" * 36, other="https://user:hunter2@example.org/x")
    logging.getLogger("elsewhere").warning("the token %s leaked", CANARY)
    text = capsys.readouterr().err
    assert text.count("\n") == 4
    for secret in (CANARY, "abc1", "abc2", "abc3", "AAAA", "hunter2"):
        assert secret not in text


def test_a_secret_registered_later_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    observe.configure()
    observe.register_secret(CANARY)
    try:
        raise ValueError(f"bad salt {CANARY}")
    except ValueError:
        observe.get_logger("t").exception("failed")
    text = capsys.readouterr().err
    assert "ValueError: bad salt [redacted]" in text
    assert CANARY not in text


@pytest.mark.parametrize("where", ["main", "thread"])
def test_an_uncaught_exception_is_logged_without_secrets(where: str) -> None:
    code = (
        "import threading\nfrom neurons.runtime import observe\n"
        f"observe.configure(secrets=['{CANARY}'])\n"
        "def boom():\n    raise RuntimeError('lost ' + 'canary-' + '7f3a9c')\n"
        + ("boom()" if where == "main" else "threading.Thread(target=boom).start()")
    )
    done = run_python("-c", code)
    assert "critical uncaught exception" in done.stderr
    assert "RuntimeError: lost [redacted]" in done.stderr
    assert CANARY not in done.stderr


def test_the_file_is_private_and_has_the_same_lines(tmp_path, capsys):
    file = tmp_path / "logs" / "miner.log"
    observe.configure(secrets=[CANARY], file=file)
    observe.get_logger("t").info("hello", value=CANARY)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text() == capsys.readouterr().err
    assert CANARY not in file.read_text()


def test_rotated_files_are_private(tmp_path, monkeypatch):
    monkeypatch.setattr(observe, "LOG_FILE_BYTES", 1)
    observe.configure(file=tmp_path / "miner.log")
    for number in range(3):
        observe.get_logger("t").info("line", number=number)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert (modes["miner.log.1"], set(modes.values())) == (0o600, {0o600})


def test_info_goes_to_stdout_and_warnings_to_stderr(capsys):
    observe.configure(ordinary=sys.stdout)
    log = observe.get_logger("t")
    log.info("all is well")
    log.warning("mind this")
    shown = capsys.readouterr()
    assert ("all is well" in shown.out, "mind this" in shown.out) == (True, False)
    assert ("all is well" in shown.err, "mind this" in shown.err) == (False, True)


@pytest.mark.parametrize("form", ["console", "json"])
def test_terminal_codes_are_removed(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    observe.configure("INFO", form)
    text = "a\x1b[2Kb\x9b31mc\u202ed\u2066e\U000e0041f"
    observe.get_logger("t").info(f"sentence {text}", detail=text)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert "sentence" in line
    assert not observe.redact_text(text).count("\u202e")


def test_untrusted_text_becomes_one_short_line_without_credentials() -> None:
    text = "fatal: bad\x1b[31m\r\nhttps://me:pass-word@github.com/x " + "y" * 1000
    shown = observe.redact_text(text)
    assert "pass-word" not in shown
    assert "https://github.com/x" in shown
    assert len(shown) <= 300
    assert shown.isprintable()


def test_a_heartbeat_logs_only_long_work() -> None:
    log = observe.get_logger("t")
    with capture_logs() as lines, heartbeat(log, "short"):
        pass
    assert lines == []
    done = itertools.count(1)

    def progress() -> dict[str, object]:
        return {"samples": next(done)}

    with (
        capture_logs() as lines,
        heartbeat(log, "long", first=0.01, longest=0.01, progress=progress),
    ):
        wait_for(lambda: len(lines) > 1)
    assert {(line["event"], line["work"]) for line in lines} == {("still at work", "long")}
    assert [line["samples"] for line in lines] == [*range(1, len(lines) + 1)]
