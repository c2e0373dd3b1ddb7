"""The journal on a real file: what it keeps, what it refuses, and who may read it."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from neurons.errors import ConfigError, QuasarError
from neurons.mining.submissions import cycle, journal, schema
from neurons.mining.submissions.cycle import CLOSED, State, Submission
from neurons.mining.submissions.journal import Journal, StaleSubmission
from tests.neurons.mining.parts import HOTKEY, draft
from tests.processes import run_python

COMMITTING: dict[str, Any] = {
    "fork_url": "https://github.com/alice/fork",
    "commit_hash": "a" * 40,
    "content_digest": "d",
    "report": "reports/a.json",
    "tokens_per_sec": 1234.5678901234567,
    "vram_mb": 12.25,
    "benchmarks": {"512": {"tokens_per_sec": 0.1 + 0.2, "vram_mb": 0.0}},
    "salt": "5" * 64,
    "commitment_hash": "c" * 64,
    "round_id": 7,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite"


@pytest.fixture
def log(path: Path) -> Iterator[Journal]:
    with Journal(path) as journal:
        yield journal


def new(log: Journal, target: int = 2048, hotkey: str = HOTKEY) -> Submission:
    first = draft(id=0, target_sequence_length=target, hotkey=hotkey, created_at=1.0)
    return log.insert(replace(first, updated_at=1.0))


def close(log: Journal, submission: Submission, state: State = State.VALIDATED) -> Submission:
    return log.transition(submission, replace(submission, state=state, updated_at=2.0))


def test_every_field_survives_a_reopening_to_the_bit(path: Path) -> None:
    with Journal(path) as log:
        first = new(log)
        full = replace(
            first,
            **COMMITTING,
            state=State.FAILED,
            resume_state=State.COMMITTING,
            auto_target=True,
            round_start="2026-01-01T00:00:00",
            round_total=5,
            submission_id=3,
            reveal_block=99,
            queued_at=3.5,
            judged_early_at=4.5,
            rank=1,
            weight=0.6,
            score=0.95,
            weighted_score=7.5,
            reason="lost",
            remedy="none",
            retry_at=1e9 + 0.1,
            attempts=4,
            updated_at=5.0,
        )
        log.transition(first, full)
    with Journal(path) as log:
        assert log.get(full.id) == full
        assert all(getattr(full, field.name) is not None for field in fields(Submission))


def test_the_salt_is_not_in_the_text_of_a_submission(log: Journal) -> None:
    assert "5" * 64 not in repr(replace(new(log), **COMMITTING))


def test_one_live_submission_for_each_hotkey_and_target(log: Journal) -> None:
    first = new(log)
    new(log, target=4096)
    new(log, hotkey="5Other")
    with pytest.raises(sqlite3.IntegrityError):
        new(log)
    held = log.transition(first, cycle.hold(first, "r", "m", 2.0))
    with pytest.raises(sqlite3.IntegrityError):
        new(log)
    log.transition(held, cycle.abandon(held, "r", 3.0))
    second = new(log)
    assert log.live(HOTKEY, 2048) == second
    assert [s.target_sequence_length for s in log.live_submissions(HOTKEY)] == [2048, 4096]


def test_a_second_connection_cannot_make_a_second_live_one(path: Path, log: Journal) -> None:
    new(log)
    with Journal(path) as other, pytest.raises(sqlite3.IntegrityError):
        new(other)


def test_a_change_and_its_event_are_one(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    first = new(log)
    monkeypatch.setattr(log, "_add_event", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        log.transition(first, cycle.fail(first, "r", 2.0, 0.0))
    assert log.get(first.id) == first
    assert len(log.events(first.id)) == 1


def test_a_stale_writer_is_refused(log: Journal) -> None:
    first = new(log)
    log.transition(first, cycle.fail(first, "r", 2.0, 0.0))
    with pytest.raises(StaleSubmission):
        log.transition(first, cycle.fail(first, "r", 2.0, 0.0))


def test_not_a_number_is_never_written(log: Journal) -> None:
    first = new(log)
    bad = {"512": {"tokens_per_sec": float("nan")}}
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.transition(first, replace(first, benchmarks=bad))
    assert log.get(first.id) == first


def test_only_the_owner_can_read_it(path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    path.touch(mode=0o644)
    with Journal(path) as log:
        close(log, new(log))
        files = list(path.parent.iterdir())
        assert len(files) == 3  # with the -wal and the -shm
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_it_is_on_the_disk_before_a_call_returns(log: Journal) -> None:
    assert log._database.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert log._database.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert log._database.execute("PRAGMA foreign_keys").fetchone()[0] == 1


@pytest.mark.parametrize("damage", ["replaced", "overwritten", "last page", "cut off"])
def test_row_18_a_damaged_file_is_refused_and_kept(path: Path, damage: str) -> None:
    with Journal(path) as log:
        for target in range(1, 200):
            new(log, target)
    whole = path.read_bytes()
    content = {
        "replaced": b"not a database, but long enough to look at" * 50,
        "overwritten": whole[:4096] + b"\xff" * 8192 + whole[12288:],
        "last page": whole[:-4096] + b"\xff" * 4096,  # of which only a check learns
        "cut off": whole[: len(whole) // 2],
    }[damage]
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged.*backup.*\.recover"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_file_that_is_locked_for_the_moment_is_no_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal(path).close()
    monkeypatch.setattr(schema, "BUSY_MILLISECONDS", 1100)
    database = sqlite3.connect(path)
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    with pytest.raises(QuasarError, match=r"at the moment.*locked.*start again") as caught:
        Journal(path)
    assert 1.0 < time.monotonic() - began < 10
    assert not isinstance(caught.value, ConfigError)
    database.close()
    Journal(path).close()


def test_a_file_that_is_unlocked_within_five_seconds_is_waited_for(path: Path) -> None:
    Journal(path).close()
    database = sqlite3.connect(path, check_same_thread=False)
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("BEGIN EXCLUSIVE")
    release = threading.Timer(0.3, database.close)
    release.start()
    Journal(path).close()
    release.join()


@pytest.mark.parametrize("size", [4096, 12288])
def test_a_full_disk_is_told_and_leaves_no_half_made_file(path: Path, size: int) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "import neurons.mining.submissions.schema as s\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        "try: s.open_database(Path(sys.argv[1]))\n"
        "except s.QuasarError as error: sys.exit(str(error))\n"
    )
    done = run_python("-c", code, path)
    assert (done.returncode, "start again" in done.stderr) == (1, True), done.stderr
    with Journal(path) as log:  # there is space again
        assert new(log).state is State.NEW


def test_row_18_a_newer_version_is_refused_and_kept(path: Path) -> None:
    Journal(path).close()
    database = sqlite3.connect(path)
    with database:
        database.execute("INSERT INTO applied (version, name) VALUES (99, 'of the future')")
    database.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"newer version.*99.*Update"):
        Journal(path)
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="STATE_DIR"):
        Journal(tmp_path / "file" / "journal.sqlite")


def older_file(path: Path, version: int, *submissions: Submission) -> None:
    """Write the journal that an older version of the program would have left."""
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


@pytest.mark.parametrize("version", [1, 2])
def test_row_18_an_older_version_migrates_with_a_live_commitment_in_it(
    path: Path, version: int
) -> None:
    older_file(path, version, COMMITMENT)
    with Journal(path) as log:
        assert log.live(HOTKEY, 2048) == COMMITMENT
        with pytest.raises(sqlite3.IntegrityError):
            new(log)
        early = cycle.advance(COMMITMENT, State.PREMATURE, 3.0)
        log.transition(COMMITMENT, early)
        assert [event.state for event in log.events(COMMITMENT.id)] == [State.PREMATURE]
        new(log)  # the index of an older version knew no such end
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT version, name FROM applied").fetchall()
    assert rows == [(1, "submissions"), (2, "events"), (3, "judged before the reveal")]


def test_a_copy_is_up_to_date_and_leaves_an_older_file_as_it_is(path: Path) -> None:
    older_file(path, 1, COMMITMENT)
    with Journal(path, copy=True) as log:
        assert log.live(HOTKEY, 2048) == COMMITMENT
        assert log.events(COMMITMENT.id) == []  # a table that the file does not have yet
        log.transition(COMMITMENT, cycle.fail(COMMITMENT, "r", 3.0, 0.0))
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT version FROM applied").fetchall() == [(1,)]
        assert database.execute("SELECT state FROM submissions").fetchall() == [("COMMITTED",)]


def test_what_an_api_was_seen_to_do_is_remembered_from_its_first_time(path: Path) -> None:
    with Journal(path) as log:
        assert log.judges_early("https://api.example") is None
        log.note_early_judgement("https://api.example", 5.0)
        log.note_early_judgement("https://api.example", 9.0)
    with Journal(path) as log:
        assert log.judges_early("https://api.example") == 5.0
        assert log.judges_early("https://other.example") is None


def test_a_copy_holds_what_another_process_has_just_written(path: Path, log: Journal) -> None:
    first = new(log)
    with Journal(path, copy=True) as reader:
        assert reader.get(first.id) == first


def test_a_missing_file_cannot_be_copied_and_is_not_made(path: Path) -> None:
    with pytest.raises(QuasarError, match="cannot be used at the moment"):
        Journal(path, copy=True)
    assert not path.exists()


def test_a_file_of_another_user_is_told_as_such(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so that the system's answer is given here."""
    Journal(path).close()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(ConfigError, match="belongs to another user"):
        Journal(path, copy=True)
    path.unlink()
    with pytest.raises(QuasarError, match="cannot be used at the moment"):
        Journal(path, copy=True)


def test_folders_that_are_missing_are_made(tmp_path: Path) -> None:
    Journal(tmp_path / "of" / "this" / "miner" / "journal.sqlite").close()


def test_the_index_knows_every_state_that_closes() -> None:
    written = {f"'{state.value}'" for state in CLOSED}
    assert set(schema.CLOSED_STATES.strip("()").split(", ")) == written


def test_history_is_bounded(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "EVENTS_KEPT", 10)
    monkeypatch.setattr(journal, "CLOSED_KEPT", 5)
    live = new(log, target=1)
    for _ in range(30):
        close(log, new(log))
    count = log._database.execute("SELECT count(*) FROM events").fetchone()[0]
    assert count == 10
    assert len(log.latest(100)) == 6
    assert log.live(HOTKEY, 1) == live


def test_history_is_kept_as_long_as_docs_say(log: Journal) -> None:
    """Of 5,001 events the newest 5,000 stay when a submission closes; nothing is dropped before."""
    first = new(log)
    rows = [(first.id, float(at), "noted", "NEW", None) for at in range(2, 5001)]
    log._database.execute("BEGIN")
    log._database.executemany(
        "INSERT INTO events (submission, at, kind, state, note) VALUES (?, ?, ?, ?, ?)", rows
    )
    log._database.execute("COMMIT")
    close(log, first)  # its event is the last of 5,001
    kept = log.events(first.id)
    assert (len(kept), kept[0].at) == (5000, 2.0)
    assert kept[-1].state is State.VALIDATED


def test_the_newest_thousand_ends_are_kept_and_every_live_one(log: Journal) -> None:
    """An end past a thousand takes the oldest one away, whatever lives beside them."""
    live, last = new(log, target=1), new(log, target=2)
    log._database.execute("BEGIN")
    for target in range(3, 1003):
        row = draft(target_sequence_length=target, state=State.REJECTED)
        log._database.execute(journal._INSERT, journal._values(row))
    log._database.execute("COMMIT")
    close(log, last)  # the oldest of 1,001
    kept = [one.target_sequence_length for one in log.latest(2000)]
    assert kept == [*range(1002, 2, -1), live.target_sequence_length]


def test_each_list_has_its_own_and_its_newest_first(log: Journal) -> None:
    """Without a target, those count whose target the miner has chosen itself."""
    drafts = [
        draft(id=0, target_sequence_length=512, auto_target=True, round_id=1),
        draft(id=0, target_sequence_length=1024, auto_target=True, round_id=2),
        draft(id=0, target_sequence_length=2048, round_id=2),
        draft(id=0, target_sequence_length=512, auto_target=True, hotkey="5Other", round_id=2),
    ]
    first, second, chosen, other = (log.insert(one) for one in drafts)
    assert log.latest() == [other]
    assert log.latest(2) == [other, chosen]
    assert log.latest(hotkey=HOTKEY) == [chosen]
    assert log.live_submissions() == [other, chosen, second, first]
    assert log.live_submissions(HOTKEY) == [chosen, second, first]
    assert log.in_round(HOTKEY, 2) == [chosen, second]
    assert log.in_round(HOTKEY, None) == []
    assert (log.live(HOTKEY), log.live(HOTKEY, 2048)) == (second, chosen)
    assert log.live(HOTKEY, 4096) is None
    assert log.last_closed(HOTKEY, None) is None
    ended = [close(log, one) for one in (first, second, chosen)]
    assert log.live(HOTKEY) is None
    assert log.live_submissions() == [other]
    assert log.last_closed(HOTKEY, None) == ended[1]
    assert log.last_closed(HOTKEY, 512) == ended[0]
    assert log.last_closed(HOTKEY, 2048) == ended[2]
    assert [event.state for event in log.events(first.id)] == [State.NEW, State.VALIDATED]
    with pytest.raises(LookupError, match="no submission 99"):
        log.get(99)


def test_a_list_has_the_newest_thousand(log: Journal) -> None:
    log._database.execute("BEGIN")
    for target in range(1, 1003):
        row = draft(target_sequence_length=target, round_id=1)
        log._database.execute(journal._INSERT, journal._values(row))
    log._database.execute("COMMIT")
    for found in (log.live_submissions(), log.in_round(HOTKEY, 1)):
        assert [one.target_sequence_length for one in found] == list(range(1002, 2, -1))


def test_history_cannot_be_rewritten(log: Journal) -> None:
    (event,) = log.events(new(log).id)
    with pytest.raises(FrozenInstanceError):
        event.at = 2.0  # type: ignore[misc]


def test_rejections_count_since_the_last_success_or_word_of_a_person(log: Journal) -> None:
    assert log.rejections(HOTKEY) == 0
    close(log, new(log), State.REJECTED)
    close(log, new(log), State.VALIDATED)
    close(log, new(log), State.REJECTED)
    close(log, new(log, hotkey="5Other"), State.REJECTED)
    close(log, new(log), State.UNRANKED)
    close(log, new(log), State.REJECTED)
    assert log.rejections(HOTKEY) == 2
    held = new(log)
    held = log.transition(held, cycle.hold(held, "r", "m", 2.0))
    log.transition(held, cycle.resume(held, 3.0), kind="acknowledged")
    assert log.rejections(HOTKEY) == 0
