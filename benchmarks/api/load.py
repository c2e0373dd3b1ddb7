"""Loads the validator API on this machine and keeps what came out as data.

    python -m benchmarks.api.load --out benchmarks/api_load.json

The server is the real process, on SQLite and on a PostgreSQL of its own; the client shares this
machine's cores with both. Only loopback is used, and every part is bounded in time and count.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
from bittensor.sp_core import Keypair
from sqlalchemy import insert, select

from benchmarks.api.client import Answers, Prepared, get, post, seconds_until_cut_off, send
from benchmarks.api.results import Backend, Load, Traffic
from benchmarks.results import ROOT
from harness.source import tree_commit
from neurons.embedded import postgresql
from neurons.validator_api.database.storage import Storage
from neurons.validator_api.database.tables import Miner, Round, Submission
from neurons.wire.protocol import HOTKEY_HEADER, SIGNATURE_HEADER, commitment_hash

ROWS, HOTKEYS, VALIDATED = 3000, 50, 1500
SECONDS, RATE = 6.0, 300.0
AT_ONCE = 1000
"""Requests that are sent without a pause, in each kind of traffic."""
KILL_AFTER_SECONDS = 4.0
CUT_OFF_LIMIT_SECONDS = 60.0
READS = (
    "/get_current_round",
    "/get_submission_stats?limit=20",
    "/pending_reveals?hotkey={hotkey}",
    "/get_weights",
    "/",
)


class Commits:
    """Signed commitments, each of which is new; all are made before they are sent."""

    def __init__(self) -> None:
        self.keys = [Keypair.create_from_uri(f"//Load{n}") for n in range(HOTKEYS)]
        self._headers = [
            {HOTKEY_HEADER: key.ss58_address, SIGNATURE_HEADER: _sign(key, key.ss58_address)}
            for key in self.keys
        ]

    def make(self, count: int) -> list[Prepared]:
        """Return so many requests; each is named by its commitment."""
        made = []
        for number in range(count):
            key, headers = self.keys[number % HOTKEYS], self._headers[number % HOTKEYS]
            digest = commitment_hash(secrets.token_hex(16), "https://github.com/a/b")
            body = {
                "miner_hotkey": key.ss58_address,
                "commitment_hash": digest,
                "target_sequence_length": 100_000,
                "signature": _sign(key, digest),
            }
            made.append(post(digest, "/commit_submission", headers, body))
        return made


def _sign(key: Keypair, text: str) -> str:
    return bytes(key.sign(text.encode())).hex()


@contextmanager
def serving(url: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the API on a free port until the block is left."""
    port_file = folder / "port"
    port_file.unlink(missing_ok=True)
    settings = {
        "ENV_FILE": os.devnull,
        "STATE_DIR": str(folder / "state"),
        "DATABASE_URL": url,
        "RATE_LIMIT": "0",
        "PORT": "0",
    }
    with (folder / "api.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "neurons.validator_api", "--port-file", str(port_file)],
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 60
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the API does not start: {(folder / 'api.log').read_text()[-2000:]}")
            time.sleep(0.05)
        yield process, int(port_file.read_text())
    finally:
        process.kill()
        process.wait()


def fill(url: str, hotkeys: Sequence[str]) -> None:
    """Put the competition into the database that the requests meet: a round under way."""
    now = datetime.now(timezone.utc).replace(tzinfo=None)
    others = [f"{n:048}" for n in range(ROWS // 10)]
    storage = Storage(url)
    miners = [
        {"hotkey": key, "uid": n, "registered_at": now} for n, key in enumerate([*hotkeys, *others])
    ]
    opened = {"id": 1, "round_number": 1, "start_time": now, "status": "active"}
    end = now + timedelta(hours=48)
    rows = [
        {
            "miner_hotkey": others[n % len(others)],
            "round_id": 1,
            "target_sequence_length": 100_000 * (1 + n % 10),
            "signature": "",
            "created_at": now,
            "is_revealed": True,
            "fork_url": "https://github.com/a/b",
            "commit_hash": "a" * 40,
            "tokens_per_sec": 1000.0 + n,
            "validated_at": now if n < VALIDATED else None,
            "withdrawn_at": None if n < VALIDATED + 100 else now,
            "score": 1.0 if n < VALIDATED else None,
        }
        for n in range(ROWS)
    ]
    storage.write(
        lambda session: (
            session.execute(insert(Miner), miners),
            session.execute(insert(Round), [opened | {"end_time": end}]),
            session.execute(insert(Submission), rows),
        )
    )
    storage.close()


def traffic(port: int, commits: Commits) -> Iterator[Traffic]:
    """Send every kind of requests, at the set rate and without a pause."""
    keys = [key.ss58_address for key in commits.keys]

    def reads(count: int) -> list[Prepared]:
        return [get(READS[n % 5].format(hotkey=keys[n // 5 % HOTKEYS])) for n in range(count)]

    def half(count: int) -> list[Prepared]:
        pairs = zip(reads(count // 2), commits.make(count // 2), strict=True)
        return [one for pair in pairs for one in pair]

    asyncio.run(send(port, reads(100), None, SECONDS))  # what is loaded once
    kinds = {"reads": reads, "commits": commits.make, "half reads, half commits": half}
    for name, make in kinds.items():
        for rate, count in ((RATE, round(RATE * SECONDS)), (None, AT_ONCE)):
            found = asyncio.run(send(port, make(count), rate, SECONDS + 1 if rate else SECONDS))
            yield _summary(name, rate, found)


def _summary(name: str, rate: float | None, found: Answers) -> Traffic:
    if len(found.seconds) < 2:
        sys.exit(f"{name}: the server answered {len(found.seconds)} of all requests with 200")
    return Traffic(
        requests=name,
        asked=rate,
        answered=len(found.seconds) / found.elapsed,
        failed=found.failed,
        p50_ms=found.percentile(0.50),
        p99_ms=found.percentile(0.99),
    )


def kill_under_load(url: str, folder: Path, commits: Commits) -> tuple[int, int, float]:
    """Kill the server with -9 among commits; return acknowledged, lost, seconds to be back."""
    with serving(url, folder) as (process, port):
        killer = threading.Timer(KILL_AFTER_SECONDS, process.send_signal, [signal.SIGKILL])
        requests = commits.make(4 * AT_ONCE)
        killer.start()
        found = asyncio.run(send(port, requests, None, SECONDS))
        killer.join()
    start = time.perf_counter()
    with serving(url, folder) as (_, port):
        httpx.get(f"http://127.0.0.1:{port}/get_current_round").raise_for_status()
        back = time.perf_counter() - start
    storage = Storage(url)
    with storage.read() as session:
        kept = set(session.scalars(select(Submission.commitment_hash)))
    storage.close()
    return len(found.names), len(set(found.names) - kept), back


def measure(name: str, url: str, folder: Path) -> tuple[Backend, float | None]:
    """Return one database's figures, and when a slow client was cut off."""
    commits = Commits()
    fill(url, [key.ss58_address for key in commits.keys])
    with serving(url, folder) as (_, port):
        found = tuple(traffic(port, commits))
        slow = asyncio.run(seconds_until_cut_off(port, CUT_OFF_LIMIT_SECONDS))
    acknowledged, lost, back = kill_under_load(url, folder, commits)
    told = {"acknowledged": acknowledged, "lost": lost, "restart_seconds": back}
    return Backend(database=name, traffic=found, **told), slow


def main() -> None:
    """Measure both databases and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    out: Path = parser.parse_args().out
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name, postgresql.serve() as server:
        folder = Path(name)
        first, slow = measure("PostgreSQL", server.new_database(), folder)
        file = f"sqlite:///{folder / 'api.db'}"
        second, _ = measure(f"SQLite {sqlite3.sqlite_version}", file, folder)
    load = Load(
        created=datetime.now(timezone.utc).date(),
        commit=tree_commit(ROOT),
        processor=_processor(),
        cores=os.cpu_count() or 1,
        load_before=before,
        rows=ROWS,
        slow_client_seconds=slow,
        backends=(first, second),
    )
    out.write_text(load.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print(load.model_dump_json(indent=1))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


if __name__ == "__main__":
    main()
