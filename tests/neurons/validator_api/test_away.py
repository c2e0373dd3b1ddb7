"""A database that is unavailable, locked or full: 503 until it recovers, and nothing is lost."""

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator, MutableMapping, Sized
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from pydantic import SecretStr
from sqlalchemy import event, select
from sqlalchemy.engine import Engine

from neurons.runtime.errors import ConfigError
from neurons.runtime.settings import Settings
from neurons.validator_api import __main__ as process
from neurons.validator_api.database import storage
from neurons.validator_api.database.storage import DatabaseAway, Storage
from neurons.validator_api.database.tables import Submission
from tests.neurons.live_api import ALICE, LiveApi, commitment, serve
from tests.processes import wait_for


@pytest.fixture
def log() -> Iterator[list[MutableMapping[str, Any]]]:
    """The API's log events during the test."""
    with structlog.testing.capture_logs() as events:
        yield events


def of_database(log: list[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    """Return the visible events except those of requests and of the round's start."""
    visible = [one for one in log if one["log_level"] != "debug"]
    return [one for one in visible if one["event"] not in ("request", "round opened")]


def rows_of(url: str) -> set[int]:
    with closing(Storage(url)) as stored, stored.read() as session:
        return set(session.scalars(select(Submission.id)))


def once_logged(log: Sized, count: int, act: Any, *arguments: object) -> threading.Thread:
    """Start a thread that acts when the log has `count` events, however slow the machine is."""

    def wait() -> None:
        wait_for(lambda: len(log) >= count)
        time.sleep(0.1)  # for further attempts, which log nothing
        act(*arguments)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def commit(api: LiveApi, salt: str) -> httpx.Response:
    return api.post("/commit_submission", commitment(ALICE, salt), ALICE)


def test_postgresql_may_crash_and_come_back(server, tmp_path, log):
    url = server.new_database()
    stop, statuses, acknowledged = threading.Event(), set(), set()

    def commit_on(api: LiveApi, name: str) -> None:
        for number in range(100_000):
            if stop.is_set():
                return
            reply = commit(api, f"{name}{number}")
            statuses.add(reply.status_code)
            if reply.status_code == 200:
                acknowledged.add(reply.json()["submission_id"])
            stop.wait(0.01)

    with serve(tmp_path, database_url=url) as api:
        api.register(ALICE)
        writers = [threading.Thread(target=commit_on, args=(api, name)) for name in "ab"]
        for writer in writers:
            writer.start()
        wait_for(lambda: len(acknowledged) > 5)
        server.stop(signal.SIGQUIT)
        try:
            wait_for(lambda: 503 in statuses)
            for path in ("/get_weights", "/pending_reveals", "/get_current_round"):
                reply = api.http.get(path)
                assert (reply.status_code, reply.headers["Retry-After"]) == (503, "5")
                assert "later" in reply.json()["detail"]
            page = api.http.get("/", headers={"Accept": "text/html"})
            assert (page.status_code, page.headers["Retry-After"]) == (503, "5")
            assert "<h1>Service Unavailable</h1>" in page.text
            assert api.get("/health") == {"status": "ok"}
        finally:
            server.start()
        before = len(acknowledged)
        wait_for(lambda: len(acknowledged) > before)
        stop.set()
        for writer in writers:
            writer.join()
        assert api.get("/pending_reveals")["pending_reveals"]
    assert statuses == {200, 503}
    assert acknowledged <= rows_of(url)
    lost, back = of_database(log)
    assert "503" in lost["event"]
    assert "is back" in back["event"]


def test_writes_to_a_locked_sqlite_file_get_503_and_reads_succeed(tmp_path, monkeypatch, log):
    monkeypatch.setattr(storage, "BUSY_SECONDS", 0.1)
    with serve(tmp_path) as api:
        api.register(ALICE)
        with closing(sqlite3.connect(tmp_path / "api.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert commit(api, "a").status_code == 503
            assert api.get("/pending_reveals")["pending_reveals"] == []
            assert commit(api, "a").status_code == 503
            other.execute("ROLLBACK")
        assert commit(api, "a").status_code == 200
    lost, back = of_database(log)
    assert "database is locked" in lost["reason"]
    assert "is back" in back["event"]


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_the_api_starts_once_its_sqlite_file_is_unlocked(tmp_path, monkeypatch, log, mode):
    monkeypatch.setattr(storage, "BUSY_SECONDS", 0.05)
    monkeypatch.setattr(process, "DATABASE_SECONDS", 0.02)
    file = tmp_path / "api.db"
    settings = Settings(state_dir=tmp_path, database_url=SecretStr(f"sqlite:///{file}"))
    with closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as other:
        other.execute(f"PRAGMA journal_mode={mode}")
        other.execute("CREATE TABLE of_another_program (id INTEGER)")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DatabaseAway, match="Another process uses the file"):
            Storage(f"sqlite:///{file}")
        unlocking = once_logged(log, 1, other.execute, "ROLLBACK")
        assert process.open_server(settings) is not None
        unlocking.join()
    assert "database is locked" in log[0]["event"]


def test_a_full_disk_refuses_new_rows_and_keeps_the_old_ones(tmp_path, log):
    """SQLite's limit on the size of a file causes the same error as a full disk."""
    full = 0

    def limit(_: object, cursor: sqlite3.Cursor, *__: object) -> None:
        if full:
            cursor.execute(f"PRAGMA max_page_count={full}")

    event.listen(Engine, "before_cursor_execute", limit)
    try:
        with serve(tmp_path) as api:
            api.register(ALICE)
            first = api.commit(ALICE, "first")
            full = 1  # SQLite raises this to the present size
            statuses = [commit(api, str(number)).status_code for number in range(100)]
            assert {200, 503} >= set(statuses)
            assert statuses[-1] == 503
            rows = rows_of(f"sqlite:///{tmp_path / 'api.db'}")
            assert len(rows) == 1 + statuses.count(200)
            assert first in rows
            full = 2**30
            assert commit(api, "room again").status_code == 200
    finally:
        event.remove(Engine, "before_cursor_execute", limit)
    lost, back = of_database(log)
    assert "database or disk is full" in lost["reason"]
    assert "is back" in back["event"]


def test_at_the_start_an_unreachable_server_is_no_configuration_error(server, tmp_path):
    url = server.new_database()
    with pytest.raises(ConfigError, match=r'no_such" does not exist.*Check its name'):
        Storage(url.replace("/quasar", "/no_such", 1))
    with pytest.raises(DatabaseAway, match="Check its host and port, and that it runs") as away:
        Storage("postgresql://quasar:hunter2@127.0.0.1:1/quasar")
    assert "hunter2" not in str(away.value)


def test_the_api_starts_once_its_database_can_be_reached(server, tmp_path, monkeypatch, log):
    monkeypatch.setattr(process, "DATABASE_SECONDS", 0.02)
    start, _, folder = server.new_database().rpartition("=")
    link = Path(folder, "link")  # to the folder of the server's socket
    settings = Settings(state_dir=tmp_path, database_url=SecretStr(f"{start}={link}"))

    stopping = once_logged(log, 1, os.kill, os.getpid(), signal.SIGTERM)
    assert process.open_server(settings) is None
    linking = once_logged(log, 2, link.symlink_to, folder)
    assert process.open_server(settings) is not None
    for thread in (stopping, linking):
        thread.join()
    link.unlink()
    assert [one["log_level"] for one in log] == ["error", "error"]
    assert "cannot be opened" in log[0]["event"]
