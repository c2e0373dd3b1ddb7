"""The command line: flags, exit statuses, messages, and no torch in this process."""

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from harness.source import tree_commit
from neurons.miner import __main__ as miner
from neurons.miner import cycle
from neurons.miner.command_line import commands
from neurons.miner.command_line.status import JOURNAL
from neurons.miner.cycle import State, Submission
from neurons.miner.journal import Journal
from neurons.miner.standing import is_due
from neurons.runtime.errors import Held
from neurons.runtime.flags import CommandLineSettings
from neurons.runtime.process import StateLock
from neurons.wire.protocol import Round
from quasar_kernels import __version__
from tests import PROJECT
from tests.neurons.miner.miner_command import BARE, Command, idle_environment, run
from tests.neurons.miner.parts import draft
from tests.processes import HANG, started, wait_for


@pytest.fixture
def state(tmp_path: Path) -> str:
    """The state folder of an embedded run."""
    return str(tmp_path / "state")


def journal_in(state: str) -> Journal:
    return Journal(Path(state, "embedded", JOURNAL))


def hold(state: str) -> Submission:
    """Insert a submission that is HELD."""
    with journal_in(state) as journal:
        new = journal.insert(draft())
        held = cycle.pause(new, Held("The push was refused.", "Do this."), time.time(), 0.0)
        return journal.transition(new, held)


def test_status_before_anything_has_run(command: Command, tmp_path: Path) -> None:
    done = command("status", "--state-dir", str(tmp_path))
    assert done.returncode == 0
    assert "none yet: ./START_MINER.sh once" in done.stdout
    shown = json.loads(command("status", "--json", STATE_DIR=str(tmp_path)).stdout)
    assert shown["submission"] is None
    assert shown["running"] is False
    assert list(tmp_path.iterdir()) == []  # `status` writes nothing


@pytest.mark.parametrize("name", ["status", "release"])
def test_the_journal_can_be_read_with_an_incomplete_env_file(command, name, tmp_path):
    file = tmp_path / ".env"
    file.write_text(f"GITHUB_TOKEN=\nSTATE_DIR={tmp_path}/state\n")
    done = command(name, "--env-file", str(file))
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/state" in done.stdout


def test_status_works_while_the_env_file_has_errors(command: Command, tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / ".env"
    with Journal(state / JOURNAL) as journal:
        journal.insert(draft())
    file.write_text(f"NETUID=x\nVALIDATOR_API_URL=https://a..b\nSTATE_DIR={state}\n")
    done = command("status", "--env-file", str(file))
    assert done.returncode == 0
    assert "submission  NEW" in done.stdout
    assert len(done.stderr.splitlines()) == 3  # the mode of the file, too
    assert command("release", "--env-file", str(file)).returncode == 78


def test_status_and_the_next_start_agree_after_abandon(command: Command, state: str) -> None:
    held = hold(state)
    command("abandon", STATE_DIR=state)
    assert "next      start the miner: make a new submission" in (
        command("status", STATE_DIR=state).stdout
    )
    with journal_in(state) as journal:
        last = journal.get(held.id)
    empty = Round(
        id=1, round_number=1, start_time="", end_time="", status="", time_remaining_seconds=0
    )
    assert is_due(last, empty, str(last.content_digest), "commit_reveal")


@pytest.mark.parametrize(
    ("words", "number", "status"),
    [(["once"], signal.SIGINT, 130), (["once"], signal.SIGTERM, 143), (["run"], signal.SIGINT, 0)],
)
def test_the_exit_status_of_a_stop_and_the_umask(tmp_path, words, number, status):
    env = idle_environment(tmp_path)
    state = Path(env["STATE_DIR"])
    with started("-m", "neurons.miner", *words, env=env, umask=0) as process:
        wait_for((state / JOURNAL).exists, child=process)
        # files of the state folder are private, whatever the user's umask
        assert "Umask:\t0077" in Path(f"/proc/{process.pid}/status").read_text()
        process.send_signal(number)
        assert process.wait(HANG) == status


def test_remedies_name_the_start_script_with_this_miner_s_flags(tmp_path: Path) -> None:
    given = CommandLineSettings({"state_dir": tmp_path / "a b"}, tmp_path / ".env.1")
    script = given.script({"ENV_FILE": "/other"})
    assert shlex.split(script) == [
        *("./START_MINER.sh", "--env-file", str(tmp_path / ".env.1")),
        *("--state-dir", str(tmp_path / "a b")),
    ]
    assert given.script({}) == script
    assert CommandLineSettings().script({}) == "./START_MINER.sh"


def test_started_as_a_file_from_anywhere(tmp_path: Path) -> None:
    entry = (str(PROJECT / "neurons" / "miner"),)
    done = run("status", "--state-dir", "here", cwd=tmp_path, entry=entry)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "here") in done.stdout  # relative to the working directory


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--netuid", "x"], {}, "NETUID='x' (flag): give a whole number"),
        (["--no-such-flag"], {}, "No such option '--no-such-flag'."),
        (["statsu"], {}, "No such command 'statsu'. Did you mean 'status'?"),
        (["help", "dcotor"], {}, "Did you mean 'doctor'?"),
        (["--env-file", "/none/.env"], {}, "No settings file at /none/.env"),
        (["once", "--state-dir", "/dev/null/state"], {}, "set another STATE_DIR"),
        ([], {"VALIDATOR_API_URL": "https://example.org"}, "GITHUB_TOKEN is not set"),
        (
            ["--repo-path", "/srv/fork", "--wallet.name", "w", "--wallet.path", "/none"],
            {"VALIDATOR_API_URL": "http://127.0.0.1:9"},
            "The hotkey at /none/w/hotkeys/default is missing",
        ),
    ],
)
def test_mistakes_exit_78_with_a_message(command, arguments, environ, message, state):
    done = command(*arguments, STATE_DIR=state, **environ)
    assert done.returncode == 78
    assert message in done.stderr


@pytest.mark.usefixtures("no_software")
def test_a_mistyped_setting_is_named_before_the_start_fails(command, tmp_path):
    file = tmp_path / ".env"
    file.write_text("CLAIM_HEADROM=0.1\nVALIDATOR_API_URL=http://127.0.0.1:9\nREPO_PATH=/none\n")
    for name in ("run", "doctor"):
        words = ["--env-file", str(file), "--wallet.path", "/none", "--device", "cpu"]
        done = command(name, *words, STATE_DIR=str(tmp_path / "state"), SUBTENSOR_NETWORK="offline")
        assert done.returncode == (78 if name == "run" else 1)
        text = " ".join((done.stdout + done.stderr).split()).lower()
        assert "claim_headrom is not a setting and is ignored" in text, text
        assert "is claim_headroom meant?" in text, text


def test_row_14_a_second_miner_names_the_first_also_in_the_log(command, state):
    with StateLock(Path(state, "embedded")):
        done = command("once", STATE_DIR=state)
    assert done.returncode == 78
    assert f"pid {os.getpid()}" in done.stderr
    assert "Traceback" not in done.stderr
    log = Path(state, "embedded/logs/miner.log")
    assert done.stderr.strip() in log.read_text()
    mistaken = command("--netuid", "x", STATE_DIR=state, NETUID="y", PORT="z")
    for line in mistaken.stderr.splitlines():
        assert f" critical {line}\n" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


def test_flags_reach_the_settings(tmp_path: Path) -> None:
    command_line = miner.cli.make_context(
        "miner",
        [
            *("--netuid", "7", "--wallet.name", "w", "--wallet.hotkey", "h"),
            *("--wallet.path", str(tmp_path), "--subtensor.network", "test", "--logging.debug"),
            *("--target-seq-len", "auto", "--agent-iterations", "9"),
            *("--optimization-interval", "5", "--repo-path", str(tmp_path)),
            *("--state-dir", str(tmp_path), "--device", "cpu", "--env-file", str(tmp_path / "e")),
        ],
    )
    (tmp_path / "e").write_text("VALIDATOR_API_URL=https://example.org\nNETUID=1\n")
    settings, embedded = commands.read_settings(command_line.ensure_object(CommandLineSettings))
    assert not embedded
    assert (settings.netuid, settings.wallet_miner_name, settings.wallet_hotkey) == (7, "w", "h")
    assert (settings.wallet_path, settings.repo_path) == (tmp_path, tmp_path)
    assert (settings.subtensor_network, settings.log_level) == ("test", "DEBUG")
    assert (settings.target_sequence_length, settings.optimization_interval) == ("auto", 5.0)
    assert (settings.state_dir, settings.device) == (tmp_path, "cpu")


@pytest.mark.parametrize(("name", "end"), [("release", State.NEW), ("abandon", State.ABANDONED)])
def test_a_person_releases_or_abandons_a_held_submission(command, name, end, state):
    assert "nothing has run" in command(name, STATE_DIR=state).stdout
    held = hold(state)
    done = command(name, STATE_DIR=state)
    assert done.returncode == 0, done.stderr
    assert end.value in done.stdout
    with journal_in(state) as journal:
        assert journal.get(held.id).state is end
    assert "nothing is held" in command(name, STATE_DIR=state).stdout


@pytest.mark.usefixtures("no_software")
def test_doctor_lists_every_problem_of_the_settings_and_fails(command: Command, state: str) -> None:
    done = command("doctor", "--json", NETUID="x", PORT="y", STATE_DIR=state)
    assert done.returncode == 1
    checks = json.loads(done.stdout)
    problems = [(one["detail"], one["remedy"]) for one in checks if one["name"] == "settings"]
    assert problems == [
        ("NETUID='x' (environment)", "give a whole number from 0 to 65535."),
        ("PORT='y' (environment)", "give a port from 0 to 65535."),
    ]
    assert {"python", "git", "disk"} <= {check["name"] for check in checks}


@pytest.mark.usefixtures("no_software")
def test_doctor_finds_no_failure_of_this_machine(command: Command, state: str) -> None:
    done = command("doctor", "--device", "cpu", STATE_DIR=state)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("0 failures, ")
    assert "no .env: the whole job runs on this machine" in done.stdout


def test_no_process_imports_torch_and_the_miner_no_bittensor() -> None:
    code = (
        "import sys, neurons.miner.__main__, neurons.miner.command_line.doctor\n"
        "import neurons.embedded.subnet\n"
        "slow = {'torch', 'triton', 'fla'}\n"
        "assert not {*slow, 'bittensor'} & set(sys.modules)\n"
        "import neurons.validator.__main__, neurons.validator_api.__main__\n"
        "assert not slow & set(sys.modules)"
    )
    done = run(entry=("-c", code))
    assert done.returncode == 0, done.stderr


def test_help_explains_the_commands_and_the_version_names_the_commit(command: Command) -> None:
    text = command("--help").stdout
    assert [name for name in miner.cli.commands if name not in text] == []
    own = command("help", "status").stdout
    assert own.startswith("Usage: START_MINER.sh status")
    assert [name for name in ("--history", "--state-dir") if name not in own] == []
    shown = command("--version").stdout.split()
    assert shown[:2] == ["quasar-miner", __version__]
    head = tree_commit(PROJECT)
    assert shown[3:] == ([head[:12]] if head else [])


def test_the_history_shows_the_newest_first(command: Command, state: str) -> None:
    for _ in range(3):
        hold(state)
        command("abandon", STATE_DIR=state)
    text = command("status", "--history", "2", STATE_DIR=state).stdout
    rows = [line.split() for line in text.splitlines() if "ABANDONED" in line][-2:]
    assert [row[0] for row in rows] == ["3", "2"]
    history = json.loads(command("status", "--json", "--history", STATE_DIR=state).stdout)[
        "history"
    ]
    assert [one["id"] for one in history] == [3, 2, 1]
    assert "salt" not in history[0]


def test_watch_shows_changes_until_ctrl_c(state: str) -> None:
    arguments = ("-m", "neurons.miner", "status", "--watch", "--state-dir", state)
    with started(*arguments, env=BARE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watch:
        out = watch.stdout
        assert out is not None
        assert "not running" in out.readline()
        hold(state)
        wait_for(lambda: "HELD" in out.readline(), child=watch)
        watch.send_signal(signal.SIGINT)
        _, err = watch.communicate(timeout=HANG)
    assert (watch.returncode, err) == (0, "")


@pytest.mark.parametrize("name", ["run", "once", "status", "backup copy", "release", "bench"])
def test_no_command_takes_a_real_miner_for_a_trial(command, state, tmp_path, monkeypatch, name):
    """The .env is lost and the process manager restarts the daemon."""
    monkeypatch.setattr("neurons.runtime.loading.ENV_FILE", tmp_path / ".env")
    with Journal(Path(state, JOURNAL)) as journal:
        journal.insert(draft(salt="ab" * 32))
    done = command(*name.split(), STATE_DIR=state, ENV_FILE="")
    assert (done.returncode, done.stdout) == (78, "")
    assert f"There is no .env, but {state} holds the journal" in done.stderr
    assert not Path(state, "embedded").exists()
    logged = Path(state, "logs/miner.log")
    assert logged.exists() == (name in ("run", "once"))
    shown = command("status", STATE_DIR=state, ENV_FILE="/dev/null")
    assert (shown.returncode, "none yet" in shown.stdout) == (0, True)


def test_restore_brings_back_a_backup_and_keeps_the_journal_before_it(command, state, tmp_path):
    copy = tmp_path / "copy.sqlite"
    assert command("backup", str(copy), STATE_DIR=state).returncode == 78
    with journal_in(state) as journal:  # open, as while the miner runs
        first = journal.insert(draft(salt="ab" * 32))
        assert command("backup", str(copy), STATE_DIR=state).returncode == 0
        assert command("backup", str(copy), STATE_DIR=state).returncode == 78  # not overwritten
        journal.transition(first, cycle.abandon(first, "later", time.time()))
    assert copy.stat().st_mode & 0o777 == 0o600
    with StateLock(Path(state, "embedded")):
        assert "pid" in command("restore", str(copy), STATE_DIR=state).stderr
    done = command("restore", str(copy), STATE_DIR=state)
    assert done.returncode == 0, done.stderr
    with journal_in(state) as journal:
        assert journal.get(first.id) == first
    with Journal(Path(state, "embedded/journal.previous.sqlite")) as journal:
        assert journal.get(first.id).state is State.ABANDONED
    copy.write_bytes(copy.read_bytes()[:100] + bytes(20000))
    damaged = command("restore", str(copy), STATE_DIR=state)
    assert (damaged.returncode, "is damaged" in damaged.stderr) == (78, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent", "There is no file"), (".", "is a folder"), ("notes", "is not a copy of a journal")],
)
def test_only_a_backup_is_restored(command, tmp_path, name, message):
    (tmp_path / "notes").write_text("a text of another program\n")
    done = command("restore", str(tmp_path / name), STATE_DIR=str(tmp_path / "state"))
    assert done.returncode == 78
    assert message in done.stderr
    assert "Name a file that `backup` made." in done.stderr
