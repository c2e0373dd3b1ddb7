"""`logs` in a separate process: the end of the log, followed through a rotation."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.neurons.miner.miner_command import BARE, Command, run
from tests.processes import HANG, started


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
