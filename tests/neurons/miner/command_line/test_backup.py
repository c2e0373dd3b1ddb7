"""Copies of the journal: any path, only journals, and paths in other databases' addresses."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from neurons.miner.command_line.status import JOURNAL
from neurons.miner.journal import Journal
from neurons.miner.schema import write_copy
from neurons.runtime.errors import ConfigError
from neurons.runtime.git.command import HardenedGit
from neurons.runtime.git.remote import parse_remote
from tests import AWKWARD
from tests.live.report import _select
from tests.neurons.live_api import serve
from tests.neurons.miner.parts import COMMITTING, HOTKEY, draft
from tests.repositories import make_repository, run_git


@pytest.mark.parametrize("kind", ["journal", "backup"])
def test_a_backup_has_every_submission_in_any_folder(command, tmp_path, kind):
    folder = tmp_path / AWKWARD
    folder.mkdir()
    state, copy = tmp_path / "state", tmp_path / "copy.sqlite"
    state, copy = (folder / "state", copy) if kind == "journal" else (state, folder / "copy")
    with Journal(state / "embedded" / JOURNAL) as journal:
        first = journal.insert(draft(salt="ab" * 32))
    done = command("backup", str(copy), STATE_DIR=str(state))
    assert done.returncode == 0, done.stderr
    with Journal(copy, copy=True) as journal:
        assert journal.latest() == [first]
    assert copy.stat().st_mode & 0o777 == 0o600
    assert not list(copy.parent.glob(f".{copy.name}*")), "a part of the copy is left"
    (state / "embedded" / JOURNAL).unlink()
    done = command("restore", str(copy), STATE_DIR=str(state))
    assert done.returncode == 0, done.stderr
    assert "its newest submission is NEW" in done.stdout
    with Journal(state / "embedded" / JOURNAL) as journal:
        assert journal.latest() == [first]


def test_a_database_without_submissions_is_neither_copied_nor_restored(command, tmp_path):
    foreign, state = tmp_path / "foreign.sqlite", tmp_path / "state"
    with closing(sqlite3.connect(foreign)) as database:
        database.execute("CREATE TABLE other (id INTEGER)")
    with Journal(state / "embedded" / JOURNAL) as journal:
        first = journal.insert(draft(salt="ab" * 32))
    done = command("restore", str(foreign), STATE_DIR=str(state))
    assert (done.returncode, "has no table of submissions" in done.stderr) == (78, True)
    with Journal(state / "embedded" / JOURNAL) as journal:
        assert journal.latest() == [first]
    target = tmp_path / "copy.sqlite"
    target.write_text("an earlier copy")
    with pytest.raises(ConfigError, match="has no table of submissions"):
        write_copy(foreign, target)
    assert target.read_text() == "an earlier copy"
    with pytest.raises(ConfigError, match="cannot be copied"):
        write_copy(tmp_path / "absent", target)
    assert not (tmp_path / "absent").exists(), "opening it created a file"


def test_a_copy_can_be_restored_from_a_read_only_disk(tmp_path: Path) -> None:
    with Journal(tmp_path / "state" / JOURNAL) as journal:
        journal.insert(draft(salt="ab" * 32))
        write_copy(journal.path, tmp_path / "copy.sqlite")
    header = (tmp_path / "copy.sqlite").read_bytes()[18:20]
    assert header == b"\1\1", f"{header!r}: a WAL database needs two more files beside it"


def test_the_live_report_reads_a_journal_in_any_folder(tmp_path: Path) -> None:
    path = tmp_path / AWKWARD / JOURNAL
    with Journal(path) as journal:
        journal.insert(draft(**COMMITTING))
    assert [row["hotkey"] for row in _select(path, "SELECT hotkey FROM submissions")] == [HOTKEY]


def test_the_api_keeps_its_database_in_any_state_folder(tmp_path: Path) -> None:
    folder = tmp_path / AWKWARD
    with serve(tmp_path, database_url=None, state_dir=folder) as api:
        assert api.http.get("/health").status_code == 200
    assert (folder / "validator_api.db").stat().st_size > 0
    assert [one.name for one in tmp_path.iterdir()] == [AWKWARD]


def test_git_reads_an_address_made_from_any_path(tmp_path: Path) -> None:
    source = make_repository(tmp_path / AWKWARD, {"file": "text"})
    remote = parse_remote(str(source))
    listed = HardenedGit(tmp_path).online(remote, None, "ls-remote", "--", remote.url, "HEAD")
    assert listed.split() == [run_git(source, "rev-parse", "HEAD").strip(), "HEAD"]
