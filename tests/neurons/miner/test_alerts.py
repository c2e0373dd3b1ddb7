"""Alerts: real commands and a real webhook, which fail, hang, and must not see secrets."""

import json
import os
import shlex
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from neurons.miner import watcher
from neurons.miner.__main__ import _context
from neurons.miner.alerts import Alerts, ways
from neurons.miner.context import PATIENCE
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle, run_forever
from neurons.miner.watcher import Watcher, copy_of
from neurons.runtime.identity import ChainUnreachable
from neurons.runtime.loading import Sources
from neurons.runtime.observe import get_logger, register_secret
from tests.neurons.fake_validator_api import COMMIT, REVEAL, Fault
from tests.neurons.miner.miner_command import idle_environment
from tests.neurons.miner.parts import make_settings, stop_after
from tests.processes import HANG, wait_for
from tests.servers import Handler, Server, serving

SECRET = "canary-of-an-alert"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The file to which the alert command appends what it gets."""
    return tmp_path / "alerts.jsonl"


@pytest.fixture
def command(tmp_path: Path, record: Path) -> str:
    script = tmp_path / "alert me.py"
    script.write_text(
        "import json, os, sys\n"
        "row = dict(text=sys.stdin.read(), env=dict(os.environ), words=sys.argv[2:])\n"
        f"open({str(record)!r}, 'a').write(json.dumps(row) + '\\n')\n"
    )
    return shlex.join([sys.executable, str(script), "--to", "me & $(touch x)"])


def rows(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def kinds(record: Path) -> list[str]:
    return [row["env"]["ALERT_KIND"] for row in rows(record)]


def make_alerts(tmp_path: Path, seconds: float = HANG, **settings: Any) -> Alerts:
    given = make_settings(tmp_path / "state", **settings)
    for secret in given.secrets():
        register_secret(secret)
    return Alerts(ways(given), tmp_path / "state/alerts.json", "5Me", seconds=seconds)


@pytest.fixture
def alerts(tmp_path: Path, command: str) -> Alerts:
    """Alerts by the command."""
    return make_alerts(tmp_path, alert_command=command)


def test_a_command_gets_the_text_without_shell_and_secrets(tmp_path, alerts, record, monkeypatch):
    monkeypatch.setenv("GITHUB_TOKEN", "ghp_" + SECRET)
    register_secret(SECRET)
    alerts.send("HELD", f"the server says\x1b[2J $(touch {tmp_path}/owned) `id` {SECRET}\nnext")
    alerts.close(HANG)
    (row,) = rows(record)
    assert (row["words"], row["text"]) == (["me & $(touch x)"], row["env"]["ALERT_TEXT"])
    assert row["text"].startswith("5Me: the server says"), row["text"]
    assert f"$(touch {tmp_path}/owned)" in row["text"]
    assert "\x1b" not in row["text"]
    assert SECRET not in json.dumps(row)
    assert not (tmp_path / "owned").exists()


def test_an_alert_is_posted_to_the_url(tmp_path):
    bodies = []

    class Hook(Handler):
        def serve(self) -> None:
            bodies.append((self.path, json.loads(self.read_body())))
            self.send(204, b"")

    server = Server(Hook)
    with serving(server), capture_logs() as logs:
        alerts = make_alerts(tmp_path, alert_url=f"{server.url}/hook/{SECRET}")
        alerts.send("REJECTED", "submission 7 is REJECTED")
        alerts.close(HANG)
    assert logs == []
    (path, body), text = bodies[0], "5Me: submission 7 is REJECTED"
    assert (path, body) == (f"/hook/{SECRET}", {"kind": "REJECTED", "text": text, "content": text})


@pytest.mark.parametrize("fault", ["hangs", "fails", "is missing", "hangs as a server"])
def test_an_alert_that_fails_neither_delays_nor_ends_anything(tmp_path, fault):
    hung = threading.Event()

    class Hook(Handler):
        def serve(self) -> None:
            hung.wait(HANG)

    server = Server(Hook)
    bad: dict[str, dict[str, Any]] = {
        "hangs": {"alert_command": "sleep 1000"},
        "fails": {"alert_command": "sh -c 'echo no disk; exit 3'"},
        "is missing": {"alert_command": "/no/such/program"},
        "hangs as a server": {"alert_url": f"{server.url}/{SECRET}"},
    }
    with serving(server), capture_logs() as logs:
        alerts = make_alerts(tmp_path, seconds=0.5 if "hangs" in fault else HANG, **bad[fault])
        alerts.send("HELD", "one")
        alerts.send("HELD", "two")
        alerts.close(0.01)  # the miner's end does not wait for them
        wait_for(lambda: len(logs) == 2)
        hung.set()
    assert [row["event"] for row in logs] == ["an alert failed"] * 2
    assert SECRET not in str(logs)
    reasons = {"fails": "no disk", "is missing": "No such file"}
    reason = reasons.get(fault, "was not done within")
    assert all(reason in row["reason"] for row in logs), logs


def test_a_condition_is_reported_once_until_its_end_even_after_a_restart(tmp_path, command, record):
    for _ in range(2):
        alerts = make_alerts(tmp_path, alert_command=command)
        for _ in range(3):
            alerts.begin("disk", "it is full")
        alerts.begin("HELD", "submission 1", 1)
        alerts.begin("HELD", "submission 2", 2)
        alerts.close(HANG)
    assert kinds(record) == ["disk", "HELD", "HELD"]
    alerts = make_alerts(tmp_path, alert_command=command)
    alerts.end("disk")
    alerts.begin("disk", "it is full")
    alerts.close(HANG)
    assert kinds(record)[3:] == ["disk"]
    assert (tmp_path / "state/alerts.json").stat().st_mode & 0o777 == 0o600


def test_states_that_need_an_operator_are_reported(miner, fake_api, alerts, record):
    context = miner(alerts=alerts)
    fake_api.faults[COMMIT].extend([Fault(422, "wrong $(touch x)")] * 2)
    assert run_cycle(context).state is State.HELD
    assert run_cycle(context).state is State.HELD  # a retry that fails is no news
    fake_api.judges_early, fake_api.verdict = True, 0.0
    assert run_cycle(context).state is State.REJECTED  # the direct one after the premature one
    alerts.close(HANG)
    assert kinds(record) == ["HELD", "PREMATURE", "REJECTED"], rows(record)
    assert "wrong $(touch x)" in rows(record)[0]["text"]


def test_an_api_that_went_away_is_reported_once(miner, fake_api, alerts, record):
    context = miner(alerts=alerts)
    assert run_cycle(context).state is State.VALIDATED
    fake_api.faults["/get_current_round"].extend([Fault(502, b"<html>")] * 5000)
    context.waiter.then = stop_after(4 * PATIENCE)
    run_forever(context)
    fake_api.commit_route = (404, "Not Found")
    for _ in range(2):
        context.waiter.then = stop_after(5)
        run_forever(context)
    alerts.close(HANG)
    assert kinds(record) == ["api", "api"], rows(record)
    assert "does not answer" in rows(record)[0]["text"]
    assert "does not serve this competition" in rows(record)[1]["text"]


def test_a_host_that_fails_for_an_hour_is_reported_once(miner, fake_api, alerts, record):
    fake_api.faults[REVEAL].extend([Fault(502, b"<html>")] * (PATIENCE + 10))
    fake_api.lists_unrevealed = False
    assert run_cycle(miner(alerts=alerts)).state is State.VALIDATED
    alerts.close(HANG)
    assert kinds(record) == ["FAILED"], rows(record)


def test_a_lost_rank_is_reported_once(miner, fake_api, alerts, record):
    context = miner(alerts=alerts)
    assert run_cycle(context).rank == 1
    context.waiter.then = stop_after(3)
    run_forever(context)
    assert kinds(record) == []
    fake_api.weights = [{"uid": 1, "hotkey": "5Other", "weight": 0.6}]
    for _ in range(2):
        context.waiter.then = stop_after(3)
        run_forever(context)
    alerts.close(HANG)
    assert kinds(record) == ["rank"]


class Chain:
    """A chain whose replies the test sets: a uid, None or a ChainUnreachable."""

    def __init__(self) -> None:
        self.reply: int | ChainUnreachable | None = 5
        self.reads = 0

    def __call__(self, *_: object) -> int | None:
        self.reads += 1
        if isinstance(self.reply, ChainUnreachable):
            raise self.reply
        return self.reply


def make_watcher(tmp_path: Path, alerts: Alerts, chain: Chain, **settings: Any) -> Watcher:
    given = make_settings(tmp_path / "state", subtensor_network="finney", **settings)
    journal, log = tmp_path / "state/journal.sqlite", get_logger("test")
    return Watcher(given, "5Me", journal, alerts, log, threading.Event(), chain)


def test_the_registration_is_read_daily_and_at_commitments(tmp_path, alerts, record, monkeypatch):
    now = [1e6]
    monkeypatch.setattr(watcher, "time", SimpleNamespace(monotonic=lambda: now[0]))
    chain = Chain()
    watching = make_watcher(tmp_path, alerts, chain)
    for pause, reads in ((0.0, 1), (3600.0, 1), (86400.0, 2)):
        now[0] += pause
        watching.look()
        assert chain.reads == reads
    now[0] += 3600.0
    chain.reply = None
    watching.note_commitment()
    watching.look()
    watching.note_commitment()  # the same submission's next state
    watching.look()
    assert chain.reads == 3
    for reply in (ChainUnreachable("no answer"), None, 5, None):
        chain.reply = reply
        now[0] += 90000.0
        watching.look()
    alerts.close(HANG)
    assert kinds(record) == ["registration", "registration"]
    assert "btcli subnets register" in rows(record)[0]["text"]


def test_a_miner_asks_for_both_at_each_commitment(miner, fake_api):
    noted: list[State] = []
    context = miner()
    context.watcher = SimpleNamespace(
        note_commitment=lambda: noted.append(context.journal.latest()[0].state)
    )
    assert run_cycle(context).state is State.VALIDATED
    assert noted == [State.COMMITTING, State.COMMITTED]


def test_low_disk_is_reported_once(tmp_path, alerts, record, monkeypatch):
    free = [10**8]
    usage = lambda _: SimpleNamespace(free=free[0])  # noqa: E731
    monkeypatch.setattr("neurons.miner.watcher.shutil.disk_usage", usage)
    watching = make_watcher(tmp_path, alerts, Chain())
    for amount in (10**8, 10**8, 12 * 10**8, 10**8, 10**10, 10**8):
        free[0] = amount
        watching.look()
    alerts.close(HANG)
    assert kinds(record) == ["disk", "disk"]


def test_a_watching_thread_survives_its_own_faults(tmp_path, monkeypatch):
    monkeypatch.setattr(watcher, "TICK_SECONDS", 0.01)
    chain = Chain()
    watching = make_watcher(tmp_path, Alerts(), chain)
    real, failures = watching._look_at_disk, [OSError("gone"), ValueError("bad")]

    def look() -> None:
        if failures:
            raise failures.pop()
        real()

    monkeypatch.setattr(watching, "_look_at_disk", look)
    watching.start()
    wait_for(lambda: chain.reads)
    watching._stop.set()
    assert failures == []


def test_the_program_connects_alerts_and_the_watcher_with_the_settings(tmp_path, command, record):
    copies = tmp_path / "copies"
    copies.mkdir()
    environ = {**idle_environment(tmp_path), "ALERT_COMMAND": command, "JOURNAL_COPY": str(copies)}
    settings = Sources({}, Path(os.devnull), environ).settings()
    with _context(settings, False, threading.Event(), "./START_MINER.sh") as context:
        context.alerts.send("disk", "it is full")
        assert context.watcher is not None
        context.watcher.note_commitment()
        context.watcher.look()
        wait_for(copy_of(copies, context.identity.hotkey).exists)
    wait_for(lambda: kinds(record))
    (row,) = rows(record)
    assert row["text"] == f"{context.identity.hotkey}: it is full"
