"""The output of `status`, and the end of the log that `logs` follows."""

import json
import os
import pty
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neurons.miner.command_line.status import Status, deadline_of, next_action
from neurons.miner.cycle import NEVER, State
from neurons.miner.journal import Journal
from neurons.runtime.identity import create_throwaway
from tests.neurons.miner.miner_command import BARE, Command, run
from tests.neurons.miner.parts import COMMITTING, draft, new
from tests.processes import HANG, started


@pytest.mark.parametrize(
    ("state", "action"),
    [
        (State.NEW, "publish the kernels"),
        (State.CLAIMED, "commit to the claim"),
        (State.COMMITTED, "block 77"),
        (State.HELD, "try again: submit the claim"),
        (State.FAILED, "try again: submit the claim"),
        (State.VALIDATED, "none"),
    ],
)
def test_status_shows_the_next_action(state: State, action: str) -> None:
    submission = draft(state=state, remedy="do this", retry_at=5.0, reveal_block=77)
    paused = state in (State.FAILED, State.HELD)
    if paused:
        submission = replace(submission, resume_state=State.CLAIMED)
    assert action in next_action(submission)
    assert (deadline_of(submission, 1.0) == 5.0) is paused


@pytest.mark.parametrize(("back", "command"), [(None, "abandon"), (State.NEW, "release")])
def test_status_names_the_command_that_a_held_submission_needs(tmp_path, back, command):
    held = draft(state=State.HELD, resume_state=back, remedy="do this", retry_at=NEVER)
    text = Status(tmp_path, True, held, None).as_text()
    assert "  remedy    do this\n" in text
    assert f"  next      run `{command}`" in text
    assert "  at " not in text


def test_an_automatic_target_has_no_league_until_the_claim(tmp_path: Path) -> None:
    automatic = draft(target_sequence_length=0, auto_target=True)
    text = Status(tmp_path, False, automatic, None).as_text()
    assert "target    auto" in text
    assert "league" not in text


@pytest.mark.parametrize(
    ("state", "stored", "shown"),
    [(State.CLAIMED, None, "500.0"), (State.RANKED, 0.0, "0.0"), (State.REJECTED, 500.0, "0.0")],
)
def test_the_score_is_that_of_the_verdict(tmp_path, state, stored, shown):
    submission = draft(
        state=state, tokens_per_sec=1000.0, target_sequence_length=2048, weighted_score=stored
    )
    assert f"  score     {shown} weighted" in Status(tmp_path, False, submission, None).as_text()


def test_a_clock_that_was_set_back_shows_no_pause_of_days() -> None:
    times: dict[str, Any] = {"updated_at": 30 * 86400.0, "retry_at": 30 * 86400.0 + 600.0}
    held = replace(draft(state=State.HELD, resume_state=State.COMMITTED), **times)
    assert deadline_of(held, 100.0) == 700.0


def test_status_shows_the_configured_hotkey_first(command, tmp_path):
    settings: dict[str, Any] = {"STATE_DIR": str(tmp_path / "state")}
    wallets = tmp_path / "wallets"
    hotkeys = {name: create_throwaway(wallets, name).hotkey for name in ("mine", "theirs")}
    with Journal(tmp_path / "state/journal.sqlite") as journal:
        own = new(journal, hotkey=hotkeys["mine"])
        left = new(journal, hotkey=hotkeys["theirs"])
        journal.transition(left, replace(left, state=State.COMMITTED, **COMMITTING))
    settings |= {"WALLET_PATH": str(wallets), "WALLET_MINER_NAME": "mine"}
    settings["VALIDATOR_API_URL"] = "https://api.example.org"
    shown = command("status", **settings).stdout
    lines = shown.splitlines()
    assert f"({own.id} locally" in lines[1]
    other = f"submission {left.id} of the hotkey {hotkeys['theirs']} is COMMITTED"
    assert [other in line for line in lines] == [False] * (len(lines) - 1) + [True]
    as_json = json.loads(command("status", "--json", **settings).stdout)
    assert as_json["submission"]["hotkey"] == hotkeys["mine"]
    assert [one["hotkey"] for one in as_json["others"]] == [hotkeys["theirs"]]


def test_control_characters_of_the_server_do_not_reach_a_terminal(tmp_path):
    hostile = "\x1b]0;owned\x07 \u202e[link=https://x.example]see[/wrong]"
    with Journal(tmp_path / "journal.sqlite") as journal:
        one = new(journal)
        held = replace(one, state=State.HELD, reason=hostile, remedy=hostile, updated_at=2.0)
        journal.transition(one, held)
    ours, theirs = pty.openpty()
    env = {**BARE, "TERM": "xterm", "COLUMNS": "200", "STATE_DIR": str(tmp_path)}
    env["VALIDATOR_API_URL"] = "https://api.example.org"
    words = ("-m", "neurons.miner", "status", "--watch")
    with started(*words, env=env, stdout=theirs, stderr=theirs):
        shown = ""
        while shown.count("see[/wrong]") < 2:
            shown += os.read(ours, 4096).decode()
    os.close(ours)
    os.close(theirs)
    assert shown.count("[link=https://x.example]see[/wrong]") == 2
    assert "\x1b]" not in shown
    assert "\u202e" not in shown


# ---- logs --------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of a hundred lines in a state folder of an embedded run."""
    path = tmp_path / "embedded/logs/miner.log"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"line {number}\n" for number in range(1, 101)))
    return path


def test_no_follow_shows_the_last_20_lines(log: Path) -> None:
    shown = run("logs", "--no-follow", STATE_DIR=str(log.parents[2]))
    assert shown.stdout.splitlines() == [f"line {number}" for number in range(81, 101)]
    assert shown.returncode == 0


def test_logs_follows_the_log_through_a_rotation_until_ctrl_c(log: Path) -> None:
    env = BARE | {"STATE_DIR": str(log.parents[2])}
    words = ("-m", "neurons.miner", "logs", "-n", "1")
    with started(*words, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "line 100\n"
        with log.open("a") as file:
            file.write("written later\n")
        assert process.stdout.readline() == "written later\n"
        log.rename(log.with_suffix(".log.1"))
        log.write_text("after the rotation\n")
        assert process.stdout.readline() == "after the rotation\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG) == -signal.SIGINT


def test_logs_names_the_path_of_a_missing_log(command: Command, tmp_path: Path) -> None:
    shown = command("logs", STATE_DIR=str(tmp_path))
    assert shown.returncode == 1
    assert f"there is no log yet at {tmp_path}/embedded/logs/miner.log" in shown.stdout
