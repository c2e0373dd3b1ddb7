"""The journal's file: permissions, damage, locks, versions and copies."""

import errno
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from neurons.miner import cycle, schema
from neurons.miner.cycle import State, Submission
from neurons.miner.journal import Journal
from neurons.runtime import sqlite_file
from neurons.runtime.errors import ConfigError, QuasarError, Retry
from tests.neurons.miner.parts import COMMITTING, HOTKEY, close, draft, history, new


def test_only_the_owner_can_read_it(path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    path.touch(mode=0o644)
    with Journal(path) as log:
        close(log, new(log))
        files = list(path.parent.iterdir())
        assert len(files) == 3  # with the -wal and the -shm
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_writes_are_on_the_disk_before_a_call_returns(log: Journal) -> None:
    assert log._database.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL


@pytest.mark.parametrize("damage", ["replaced", "last page"])
def test_row_18_a_damaged_file_is_refused_and_kept(path: Path, damage: str) -> None:
    with Journal(path) as log:
        for target in range(1, 200):
            new(log, target)
    whole = path.read_bytes()
    content = {
        "replaced": b"not a database, but long enough to look at" * 50,
        "last page": whole[:-4096] + b"\xff" * 4096,  # only `quick_check` finds it
    }[damage]
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged.*backup.*\.recover"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_locked_file_is_a_temporary_fault(path, monkeypatch):
    Journal(path).close()
    monkeypatch.setattr(sqlite_file, "BUSY_MILLISECONDS", 300)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(QuasarError, match=r"at the moment.*locked.*start again") as caught:
            Journal(path)
    assert not isinstance(caught.value, ConfigError)


def test_a_full_disk_at_the_first_start_is_a_temporary_fault(path, monkeypatch):
    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("neurons.runtime.sqlite_file.os.open", full)
    with pytest.raises(QuasarError, match=r"No space left.*Free space") as caught:
        Journal(path)
    assert not isinstance(caught.value, ConfigError)


def test_row_18_a_newer_version_is_refused_and_kept(path: Path) -> None:
    Journal(path).close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO applied (version, name) VALUES (99, 'of the future')")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"newer version.*99.*Update"):
        Journal(path)
    assert path.read_bytes() == before


def older_file(path: Path, version: int, *submissions: Submission) -> None:
    """Write a journal as an older version of the program did."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE applied (version INTEGER PRIMARY KEY, name TEXT, at TEXT)")
        for number, (name, statements) in enumerate(schema.MIGRATIONS[:version], 1):
            for statement in statements:
                database.execute(statement)
            database.execute("INSERT INTO applied (version, name) VALUES (?, ?)", (number, name))
        columns = [row[1] for row in database.execute("PRAGMA table_info(submissions)")]
        for submission in submissions:
            values = {**vars(submission), "state": submission.state.value, "benchmarks": "{}"}
            row = [values[name] for name in columns]
            marks = ", ".join("?" * len(row))
            database.execute(f"INSERT INTO submissions VALUES ({marks})", row)  # noqa: S608
        database.commit()


COMMITMENT = draft(
    **{"tokens_per_sec": 1.0, **COMMITTING, "benchmarks": {}},
    state=State.COMMITTED,
    submission_id=3,
    reveal_block=9,
    created_at=1.0,
    updated_at=2.0,
)


def test_row_18_an_older_version_migrates_with_a_live_commitment_in_it(path):
    older_file(path, 1, COMMITMENT)
    with Journal(path) as log:
        assert log.live(HOTKEY, 2048) == COMMITMENT
        with pytest.raises(sqlite3.IntegrityError):
            new(log)
        early = cycle.advance(COMMITMENT, State.PREMATURE, 3.0)
        log.transition(COMMITMENT, early)
        assert history(log, COMMITMENT.id) == [State.PREMATURE]
        new(log)  # the old index, which counted PREMATURE as live, would refuse it
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT version, name FROM applied").fetchall()
    assert rows == [(n, name) for n, (name, _) in enumerate(schema.MIGRATIONS, 1)]


def test_a_copy_is_migrated_and_leaves_the_older_file_unchanged(path: Path) -> None:
    older_file(path, 1, COMMITMENT)
    with Journal(path, copy=True) as log:
        assert log.live(HOTKEY, 2048) == COMMITMENT
        assert history(log, COMMITMENT.id) == []  # the older file had no such table
        log.transition(COMMITMENT, cycle.pause(COMMITMENT, Retry("r"), 3.0, 0.0))
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT version FROM applied").fetchall() == [(1,)]
        assert database.execute("SELECT state FROM submissions").fetchall() == [("COMMITTED",)]


def test_a_missing_file_is_not_copied_and_a_missing_folder_names_its_setting(path: Path) -> None:
    with pytest.raises(QuasarError, match="cannot be used at the moment"):
        Journal(path, copy=True)
    assert not path.exists()
    path.parent.parent.mkdir(exist_ok=True)
    path.parent.touch()
    with pytest.raises(ConfigError, match="STATE_DIR"):
        Journal(path)
