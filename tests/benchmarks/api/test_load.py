"""The client that loads the API counts what it was answered; the document says what came out."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.api.client import get, send
from benchmarks.api.load import Commits
from benchmarks.api.page import limits, load, section
from benchmarks.limits import missed
from tests.neurons.live_api import serve


def test_the_client_counts_what_was_taken_and_what_was_not(tmp_path: Path) -> None:
    with serve(tmp_path) as api:
        port = int(api.url.rpartition(":")[2])
        commits = Commits()
        for key in commits.keys[:3]:
            body = {"hotkey": key.ss58_address, "model_name": "m", "league": "1M"}
            headers = {"Hotkey": key.ss58_address}
            headers["Signature"] = bytes(key.sign(key.ss58_address.encode())).hex()
            assert api.http.post("/register_miner", json=body, headers=headers).status_code == 200
        requests = [*commits.make(4), get("/health"), get("/nothing")]  # the fourth is unknown
        found = asyncio.run(send(port, requests, rate=200.0, seconds=20.0))
        shown = api.get("/pending_reveals")["pending_reveals"]
        late = asyncio.run(send(port, [get("/health")] * 5, rate=1.0, seconds=0.5))
    assert (len(found.seconds), found.failed) == (4, 2)
    taken = {name[:16] for name in found.names if not name.startswith("/")}
    assert {row["commitment_hash"].removesuffix("...") for row in shown} == taken
    assert late.failed > 0  # what was due and was not sent is no success
    assert 0 < found.percentile(0.5) <= found.percentile(0.99) <= 20_000


def test_nothing_acknowledged_was_lost() -> None:
    run = load()
    assert [backend.lost for backend in run.backends] == [0, 0]
    assert all(backend.acknowledged > 0 for backend in run.backends)
    assert run.slow_client_seconds is not None


def test_a_missed_limit_is_named() -> None:
    run = load()
    worse = run.backends[0].model_copy(update={"lost": 3})
    with_loss = run.model_copy(update={"backends": (worse, run.backends[1])})
    assert any(line == "PostgreSQL: lost: 3, limit 0" for line in missed(limits(with_loss)))
    assert "PostgreSQL: lost: 3" in section(with_loss)
    assert section(run).count("\n| ") == 2 + 2 * 6
