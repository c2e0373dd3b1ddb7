"""JOURNAL_COPY: a copy after each commitment, its faults, and a lost state folder."""

import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from neurons.miner import watcher
from neurons.miner.alerts import Alerts
from neurons.miner.command_line.backup import require_no_lost_journal
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle
from neurons.miner.journal import Journal
from neurons.miner.watcher import Watcher, copy_of
from neurons.runtime.errors import ConfigError
from neurons.runtime.identity import create_throwaway
from neurons.runtime.observe import get_logger
from tests.neurons.miner.miner_command import idle_environment
from tests.neurons.miner.parts import COMMITTING, draft, stop_after
from tests.processes import HANG


class Kinds(Alerts):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def send(self, kind: str, text: str) -> None:
        self.kinds.append(kind)


def attach(context: Any, folder: Path) -> tuple[Watcher, Kinds]:
    alerts = Kinds()
    context.settings = context.settings.model_copy(
        update={"journal_copy": folder, "subtensor_network": "offline"}
    )
    hotkey, path = context.identity.hotkey, context.journal.path
    log = get_logger("test")
    context.watcher = Watcher(context.settings, hotkey, path, alerts, log, threading.Event())
    return context.watcher, alerts


def copy(watching: Watcher) -> None:
    watching.look()
    assert watching._copying is not None
    watching._copying.join(HANG)


def test_the_salt_of_a_commitment_is_copied_before_its_reveal(context, tmp_path, waits):
    folder = tmp_path / "other disk"
    folder.mkdir()
    watching, alerts = attach(context, folder)
    waits.then = stop_after(1)
    committed = run_cycle(context)
    assert committed.state is State.COMMITTED
    copy(watching)
    file = copy_of(folder, committed.hotkey)
    with Journal(file, copy=True) as journal:
        assert journal.latest() == [committed]
        assert journal.latest()[0].salt == committed.salt != None  # noqa: E711
    assert file.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in folder.iterdir()] == [file.name]
    assert alerts.kinds == []


def test_a_copy_that_fails_is_reported_and_stops_nothing(context, tmp_path):
    folder = tmp_path / "unmounted"
    watching, alerts = attach(context, folder)
    with capture_logs() as logs:
        assert run_cycle(context).state is State.VALIDATED
        copy(watching)
        context.watcher.note_commitment()
        copy(watching)
    assert not folder.exists(), "the folder of a missing mount was created"
    assert [row["event"] for row in logs if "JOURNAL_COPY" in row["event"]] == [
        "the journal is not copied to JOURNAL_COPY"
    ] * 2
    assert alerts.kinds == ["journal copy"]
    folder.mkdir()
    watching.note_commitment()
    copy(watching)
    folder.chmod(0o700)
    assert copy_of(folder, context.identity.hotkey).exists()


def test_a_copy_that_hangs_delays_nothing(context, tmp_path, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(watcher, "write_copy", lambda *_: ended.wait(HANG))
    watching, alerts = attach(context, tmp_path)
    assert run_cycle(context).state is State.VALIDATED
    watching.look()
    watching.note_commitment()
    watching.look()
    assert alerts.kinds == ["journal copy"]
    ended.set()


def test_restore_finds_the_copy_and_a_start_does_not_replace_it(command, tmp_path):
    me = create_throwaway(tmp_path / "wallets", "w")
    folder = tmp_path / "other disk"
    environ = {**idle_environment(tmp_path), "JOURNAL_COPY": str(folder)}
    assert "JOURNAL_COPY is not set" in command("restore", **idle_environment(tmp_path)).stderr
    with Journal(copy_of(folder, me.hotkey)) as journal:
        first = journal.insert(draft(**COMMITTING, hotkey=me.hotkey, state=State.COMMITTING))
    refused = command("once", **environ)
    assert refused.returncode == 78
    assert "is lost, and JOURNAL_COPY has" in refused.stderr
    assert f"{shlex.quote(environ['STATE_DIR'])} restore`" in refused.stderr
    done = command("restore", **environ)
    assert done.returncode == 0, done.stderr
    with Journal(Path(environ["STATE_DIR"]) / "journal.sqlite") as journal:
        assert journal.latest() == [first]


def test_without_a_hotkey_a_single_copy_is_found(command, tmp_path):
    folder = tmp_path / "other disk"
    environ = {**idle_environment(tmp_path), "JOURNAL_COPY": str(folder)}
    environ["WALLET_MINER_NAME"] = "lost"
    for number, (status, part) in enumerate([(0, "restored from"), (78, "has 2 copies")]):
        with Journal(folder / f"journal-5Me{number}.sqlite") as journal:
            journal.insert(draft())
        done = command("restore", **environ)
        assert (done.returncode, part in done.stdout + done.stderr) == (status, True), done


def test_a_start_with_its_journal_or_without_a_copy_is_allowed(context, tmp_path):
    settings = context.settings.model_copy(update={"journal_copy": tmp_path / "copies"})
    require_no_lost_journal(settings, "5Me")
    with Journal(copy_of(tmp_path / "copies", "5Me")):
        pass
    require_no_lost_journal(settings, "5Me")
    elsewhere = settings.model_copy(update={"state_dir": tmp_path / "new"})
    with pytest.raises(ConfigError, match="is lost"):
        require_no_lost_journal(elsewhere, "5Me")
