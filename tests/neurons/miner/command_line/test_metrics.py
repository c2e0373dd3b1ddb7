"""/metrics and /healthz over HTTP, from a real journal."""

import re
import socket
import time
from pathlib import Path

import httpx
import pytest

from neurons.miner import cycle
from neurons.miner.command_line import metrics
from neurons.miner.command_line.metrics import serving
from neurons.miner.command_line.status import JOURNAL
from neurons.miner.cycle import State
from neurons.miner.journal import Journal
from neurons.runtime.errors import ConfigError, Held
from neurons.wire.rules import block_at
from tests.neurons.miner.parts import COMMITTING, draft
from tests.processes import HANG


def get(port: int | None, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=HANG)


def figure(text: str, name: str) -> float:
    (value,) = re.findall(rf"^quasar_{re.escape(name)} (\S+)$", text, re.M)
    return float(value)


def test_the_metrics_show_the_submission_the_claim_and_earlier_ends(tmp_path: Path) -> None:
    ahead = block_at(time.time()) + 50
    with Journal(tmp_path / JOURNAL) as journal:
        journal.insert(draft(state=State.RANKED, rank=2, **COMMITTING))
        journal.insert(draft(state=State.COMMITTED, reveal_block=ahead, **COMMITTING))
        with serving(tmp_path, 0) as port:
            text = get(port, "/metrics").text
            assert get(port, "/healthz").json() == {"status": "ok", "state": "COMMITTED"}
            assert get(port, "/journal.sqlite").status_code == 404
    assert figure(text, 'state{state="COMMITTED"}') == 1
    assert figure(text, "claim_tokens_per_second") == COMMITTING["tokens_per_sec"]
    assert 49 * 12 <= figure(text, "reveal_seconds") <= 50 * 12
    assert (figure(text, 'ended{state="RANKED"}'), figure(text, "rank")) == (1, 2)
    assert COMMITTING["salt"] not in text


def test_a_held_submission_is_not_healthy(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        new = journal.insert(draft())
        journal.transition(new, cycle.pause(new, Held("Refused.", "Do this."), time.time(), 0.0))
    with serving(tmp_path, 0) as port:
        reply = get(port, "/healthz")
    assert reply.status_code == 503
    assert reply.json() == {"status": "held", "reason": "Refused.", "remedy": "Do this."}
    with serving(tmp_path, 0, "5Another") as port:
        assert get(port, "/healthz").json() == {"status": "ok", "state": None}


def test_row_17_a_full_disk_is_degraded_health(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "START_BYTES", 2**63)  # more than any disk has
    with serving(tmp_path, 0) as port:
        reply = get(port, "/healthz")
    assert (reply.status_code, reply.json()["status"]) == (503, "degraded")


def test_the_server_is_off_by_default_and_on_loopback_and_reports_a_used_port(tmp_path):
    with serving(tmp_path, None) as port:
        assert port is None
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"METRICS_PORT={taken}"), serving(tmp_path, taken):
            pass
    with serving(tmp_path, 0) as port:
        row = f"0100007F:{port:04X}"
        assert row in Path("/proc/net/tcp").read_text()


def test_a_damaged_journal_and_a_missing_state_folder_are_503(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(b"no journal" * 1000)
    with serving(tmp_path, 0) as port:
        for _ in range(2):  # the server goes on
            assert get(port, "/metrics").status_code == 503
    with serving(tmp_path / "state", 0) as port:
        assert get(port, "/healthz").status_code == 503


def test_a_silent_client_is_disconnected(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "IDLE_SECONDS", 0.01)
    with serving(tmp_path, 0) as port, socket.create_connection(("127.0.0.1", port or 0)) as client:
        client.settimeout(HANG)
        assert client.recv(1) == b""
