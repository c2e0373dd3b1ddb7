"""The process `python -m neurons.validator_api`, and its transactions."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from neurons.validator_api.__main__ import main
from neurons.validator_api.competition.rounds import utc
from neurons.validator_api.database.storage import DatabaseAway, Storage
from neurons.validator_api.database.tables import Miner
from tests.neurons.live_api import ALICE
from tests.postgresql import on_both
from tests.processes import HANG, started, wait_for


@contextmanager
def process(folder: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    port_file, state = folder / "port", str(folder / "state")
    env = {**os.environ, "ENV_FILE": os.devnull, "STATE_DIR": state, "PORT": "0", **variables}
    command = ("-m", "neurons.validator_api", "--port-file", str(port_file))
    with started(*command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        yield child, port_file


def port_of(path: Path, child: subprocess.Popen[str]) -> str:
    wait_for(path.exists, child=child)
    return path.read_text().strip()


@pytest.mark.parametrize(
    ("number", "proxies", "client"),
    [(signal.SIGTERM, "", '""'), (signal.SIGINT, "10.0.0.1, 127.0.0.1", "203.0.113.9")],
)
def test_serves_until_a_signal(tmp_path, number, proxies, client):
    with process(tmp_path, TRUSTED_PROXIES=proxies) as (child, port_file):
        url = f"http://127.0.0.1:{port_of(port_file, child)}"
        headers = ALICE.headers()
        body = {"hotkey": ALICE.hotkey, "model_name": "m", "league": "1M"}
        forwarded = {**headers, "X-Forwarded-For": "203.0.113.9"}
        reply = httpx.post(f"{url}/register_miner", json=body, headers=forwarded, timeout=HANG)
        assert reply.json()["status"] == "registered"
        state = tmp_path / "state"
        assert [path for path in (state, *state.rglob("*")) if path.stat().st_mode & 0o077] == []
        child.send_signal(number)
        log, _ = child.communicate(timeout=HANG)
    assert child.returncode == 0
    assert f"url={url}" in log
    assert "path=/register_miner status=200" in log
    assert f"client={client}" in log  # only a trusted proxy may name the client
    assert headers["Signature"] not in log
    assert "VALIDATOR_HOTKEYS is empty" in log
    assert (tmp_path / "state" / "validator_api.db").exists()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("DATABASE_URL", "no url at all", "or postgresql:// with user, password, host and name"),
        ("STATE_DIR", "/dev/null", "The state folder /dev/null cannot be written"),
        ("DATABASE_URL", "postgresql://me@a..b/name", "DATABASE_URL cannot be read"),
        ("DATABASE_URL", "mysql://host/name", "DATABASE_URL cannot be read"),
        ("DATABASE_URL", "file.db", "Write sqlite:///FOLDER/FILE,"),  # the example is not redacted
        ("DATABASE_URL", "sqlite:////proc/nowhere/api.db", "Name a file of SQLite"),
    ],
)
def test_configuration_errors_exit_with_78(tmp_path, monkeypatch, capsys, variable, value, words):
    monkeypatch.setenv("ENV_FILE", os.devnull)
    monkeypatch.setenv("STATE_DIR", str(tmp_path))
    monkeypatch.setenv(variable, value)
    assert main([]) == 78
    shown = "".join(capsys.readouterr())
    assert words in shown
    assert "Traceback" not in shown


@on_both
def test_writers_wait_for_one_another(database_url: str) -> None:
    storages = [Storage(database_url) for _ in range(2)]  # as in two processes

    def register(name: str) -> None:
        with storages[len(name) % 2].write() as session:
            rows = session.scalars(select(Miner)).all()
            time.sleep(0.01)  # a stale read would give two hotkeys the same uid
            session.add(Miner(hotkey=name, uid=len(rows), registered_at=utc(0)))

    threads = [threading.Thread(target=register, args=("k" * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with storages[0].read() as session:
        assert sorted(session.scalars(select(Miner.uid))) == list(range(8))
    for storage in storages:
        storage.close()


@on_both
def test_a_failed_write_leaves_nothing(database_url: str) -> None:
    storage = Storage(database_url)

    def write() -> None:
        with storage.write() as session:
            session.add(Miner(hotkey="a", uid=0, registered_at=utc(0)))
            session.flush()
            raise OperationalError("the server went away", None, OSError())

    with pytest.raises(DatabaseAway):
        write()
    with storage.read() as session:
        assert session.scalars(select(Miner)).all() == []
    storage.close()
