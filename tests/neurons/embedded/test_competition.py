"""A competition's parts against a live API; the whole of it is one command that takes minutes."""

from __future__ import annotations

import json
import py_compile
import shutil
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from harness.worker.rules import find_broken_rules
from neurons.embedded import competition as competition_module
from neurons.embedded import postgresql
from neurons.embedded.competition import CHUNK, DATABASE, Competition
from neurons.embedded.results import Results
from neurons.validator.clone import Sources, clone
from neurons.validator_api.database.storage import Storage
from quasar_kernels.contract import LAYER_FILE, OVERLAY, QUASAR_DIR
from tests.neurons.live_api import VALIDATOR, Hotkey, LiveApi, submission
from tests.postgresql import programs_or_skip
from tests.repositories import run_git


@pytest.fixture
def competition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Competition:
    monkeypatch.setenv("TARGET_SEQUENCE_LENGTH", "512")
    stop = threading.Event()
    return Competition(tmp_path / "home", 2, inference=True, cheat=True, stop=stop)


def test_each_has_a_hotkey_a_kernel_and_a_server_of_its_own(competition: Competition) -> None:
    assert competition.cheat is not None
    hotkeys = [entry.identity.hotkey for entry in (*competition.entries, competition.cheat)]
    assert len(set(hotkeys)) == 3
    assert len({entry.kernel for entry in competition.entries}) == 2
    servers = competition.settings.inference_servers
    assert [server.split("=")[0] for server in servers] == hotkeys[:2]
    addresses = {*(server.split("=")[1] for server in servers)}
    assert len(addresses | {competition.settings.reference_inference_url}) == 3
    text = (OVERLAY / QUASAR_DIR / "chunk_torch.py").read_text()
    assert text.count(CHUNK) == 1  # what a miner's copy changes


def test_the_cheat_submits_a_fork_that_keeps_the_rules_and_is_told_why_it_fails(
    competition: Competition, api: LiveApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = shutil.copytree(OVERLAY, tmp_path / "overlay")  # an overlay that was imported once
    py_compile.compile(str(used / LAYER_FILE), doraise=True)
    assert list(used.rglob("*.pyc"))
    monkeypatch.setattr(competition_module, "OVERLAY", used)
    cheat = competition.cheat
    assert cheat is not None
    competition._submit_cheat(api.url, cheat)
    (row,) = api.get("/get_submission_stats")["recent_submissions"]
    assert (row["miner_hotkey"], row["target_sequence_length"]) == (cheat.identity.hotkey, 512)
    home = Sources(files=True)
    tree = clone(row["fork_url"], row["commit_hash"], tmp_path, sources=home)
    assert find_broken_rules(str(tree)).sentences == ()  # as the validator asks
    assert "Skip the recurrence" in (tree / QUASAR_DIR / "chunk.py").read_text()
    assert run_git(tree, "rev-parse", "HEAD") == row["commit_hash"]


class _Key(Hotkey):
    """A participant's identity, as the live API's helpers take one."""

    def __init__(self, identity: object) -> None:
        self._identity = identity
        self.hotkey = identity.hotkey  # type: ignore[attr-defined]

    def sign(self, text: str) -> str:
        return str(self._identity.sign(text))  # type: ignore[attr-defined]


def test_the_table_is_of_the_round_that_has_ended(competition: Competition, api: LiveApi) -> None:
    assert competition.cheat is not None
    entries = [*competition.entries, competition.cheat]
    log = competition.folder / "validator.log"
    old = {"event": "verdict", "submission": 1, "reason": "of an earlier competition"}
    log.write_text(json.dumps(old) + "\n")
    results = Results(api.url, entries, VALIDATOR, log)
    lines = ["no JSON"]
    for entry, speed, score in zip(entries, (10.0, 20.0, 5e6), (1.0, 1.0, 0.0), strict=True):
        key = _Key(entry.identity)
        api.register(key)
        row = api.ok("/submit_kernel", submission(key, speed), key)["submission_id"]
        assert not results.all_judged()
        api.mark(row, score)
        told = {"event": "verdict", "submission": row, "reason": f"because of {entry.name}"}
        lines.append(json.dumps(told))
    with log.open("a") as file:
        file.write("\n".join(lines) + "\n")
    assert results.all_judged()
    assert not competition.as_it_should_be  # a place in a round that goes on is worth nothing
    assert results.end_round() == "round 1 has ended"
    assert not results.are_final()
    shares = {entries[1].identity.hotkey: 0.6, entries[0].identity.hotkey: 0.25}
    with log.open("a") as file:
        file.write(json.dumps({"event": "weights", "shares": shares}) + "\n")
    assert results.are_final()
    head, first, second, last = results.table()
    assert head.split() == ["rank", "miner", "kernel", "claim", "weight", "verdict"]
    assert first.split()[:2] == ["1", "miner-2"]
    assert "0.60  because of miner-2" in first
    assert "0.25  because of miner-1" in second
    assert last.split()[:2] == ["-", "cheat"]
    assert "0.00  because of cheat" in last
    assert competition.as_it_should_be
    assert {row["weight"] for row in api.get("/get_weights")["weights"]} == {0.6, 0.25}
    entries[2].weight = 0.05
    assert not competition.as_it_should_be


def test_an_earlier_competition_is_forgotten(competition: Competition) -> None:
    folder = competition.folder
    left = [folder / "miner-1/state/journal", folder / "cheat.git/HEAD", folder / "port"]
    for file in (*left, folder / DATABASE, folder / f"{DATABASE}-wal"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    competition._clear()
    assert [file.exists() for file in left] == [False, False, True]
    assert list(folder.glob(f"{DATABASE}*")) == []


def test_the_database_is_postgresqls_where_that_is_installed(
    competition: Competition, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs_or_skip()
    with competition._database() as (url, name):
        assert name.startswith("PostgreSQL")
        with closing(Storage(url)) as storage, storage.read() as session:
            assert str(session.scalar(text("SELECT version()"))).startswith("PostgreSQL")
    monkeypatch.setattr(postgresql, "find_programs", lambda: None)
    with competition._database() as (url, name):
        assert name == "SQLite (PostgreSQL: apt install postgresql)"
        Storage(url).close()
    assert (competition.folder / DATABASE).exists()
