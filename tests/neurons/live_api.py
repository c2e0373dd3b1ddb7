"""A real validator API on a loopback port, with a clock that tests set, and hotkeys that sign."""

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
from bittensor.sp_core import Keypair
from pydantic import BaseModel

from neurons.runtime.identity import Identity
from neurons.runtime.network import certificates
from neurons.runtime.server import Server, listen
from neurons.runtime.settings import Settings
from neurons.validator_api.api import Api
from neurons.validator_api.app import create_app
from neurons.validator_api.database.storage import Storage
from neurons.wire import protocol, rules
from neurons.wire.signed_request import signed_headers
from tests.processes import HANG

FORK = "https://github.com/alice/flash-linear-attention"
COMMIT = "a" * 40
BLOCKS = 3
JSON = {"Content-Type": "application/json"}
BOUND: dict[str, type[BaseModel]] = {
    "/submit_kernel": protocol.SubmitRequest,
    "/commit_submission": protocol.CommitRequest,
    "/reveal_submission": protocol.RevealRequest,
}
"""Bodies that a miner signs."""


class Clock:
    """Unix seconds that only the test changes."""

    def __init__(self) -> None:
        self.now = 1_770_000_000.0

    def __call__(self) -> float:
        return self.now


class Hotkey(Identity):
    """A test key; `Hotkey("//Alice")`."""

    def __init__(self, uri: str) -> None:
        keypair = Keypair.create_from_uri(uri)
        super().__init__(keypair.ss58_address, keypair)

    def headers(self) -> dict[str, str]:
        return {"Hotkey": self.hotkey, "Signature": self.sign(self.hotkey)}


ALICE, BOB, VALIDATOR = Hotkey("//Alice"), Hotkey("//Bob"), Hotkey("//Validator")


class LiveApi:
    """The server's address and clock, and its calls."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.url = url
        self.clock = clock
        self.http = httpx.Client(base_url=url, verify=certificates(), timeout=HANG)

    def get(self, path: str, **params: Any) -> Any:
        response = self.http.get(path, params=params)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, body: Any, key: Hotkey | None = None) -> httpx.Response:
        return self.http.post(path, json=body, headers=key.headers() if key else {})

    def verdict(self, path: str, body: Any, key: Hotkey = VALIDATOR) -> httpx.Response:
        """Send a validator's write, signed as a whole."""
        content = json.dumps(body).encode()
        headers = signed_headers(key, "POST", path, content, time.time())
        return self.http.post(path, content=content, headers=headers | JSON)

    def queue(self, **params: Any) -> Any:
        target = str(httpx.URL("/validation_queue", params=params))
        headers = signed_headers(VALIDATOR, "GET", target, b"", time.time())
        response = self.http.get(target, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    def judge(self, path: str, body: Any) -> Any:
        """Return the reply to a validator's write, which must succeed."""
        response = self.verdict(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def ok(self, path: str, body: Any, key: Hotkey | None = None) -> Any:
        response = self.post(path, body, key)
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, path: str, body: Any, key: Hotkey | None = None) -> tuple[int, Any]:
        response = self.post(path, body, key)
        return response.status_code, response.json()["detail"]

    def register(self, key: Hotkey, model: str = "Qwen", league: str = "100k") -> Any:
        body = {"hotkey": key.hotkey, "model_name": model, "league": league}
        return self.ok("/register_miner", body, key)

    def submit(self, key: Hotkey, speed: float, **options: Any) -> int:
        body = submission(key, speed, **options)
        return int(self.ok("/submit_kernel", body, key)["submission_id"])

    def commit(self, key: Hotkey, salt: str = "salt", fork: str = FORK) -> int:
        return int(self.ok("/commit_submission", commitment(key, salt, fork), key)["submission_id"])

    def mark(self, submission_id: int, score: float) -> None:
        self.judge("/mark_validated", {"submission_id": submission_id, "score": score})

    def judged(self, key: Hotkey, speed: float, score: float = 1.0, **options: Any) -> int:
        """Register, submit and mark; return the submission's id."""
        self.register(key)
        row = self.submit(key, speed, **options)
        self.mark(row, score)
        return row

    def reveal(self, key: Hotkey, row: int, salt: str = "salt") -> None:
        self.ok("/reveal_submission", revelation(key, row, salt), key)

    def pending(self, **params: Any) -> list[int]:
        rows = self.get("/pending_reveals", **params)["pending_reveals"]
        return [row["submission_id"] for row in rows]

    def weights(self, **params: Any) -> list[tuple[str, float]]:
        """Return hotkeys and weights of a round, by default of the last completed one."""
        rows = self.get("/get_weights", **params)["weights"]
        return [(row["hotkey"], row["weight"]) for row in rows]

    def refused_verdict(self, path: str, body: Any, key: Hotkey = VALIDATOR) -> tuple[int, Any]:
        response = self.verdict(path, body, key)
        return response.status_code, response.json()["detail"]

    def pass_blocks(self, count: int) -> None:
        self.clock.now += count * rules.BLOCK_SECONDS


def submission(
    key: Hotkey,
    speed: float = 1000.0,
    *,
    target: int = 100_000,
    fork: str = FORK,
    commit: str = COMMIT,
    benchmarks: dict[str, dict[str, float]] | None = None,
) -> dict[str, Any]:
    signature = key.sign(protocol.submission_text(fork, commit, speed, benchmarks))
    code = {"fork_url": fork, "commit_hash": commit, "target_sequence_length": target}
    claim = {"tokens_per_sec": speed, "benchmarks": benchmarks}
    return {"miner_hotkey": key.hotkey, "signature": signature, **code, **claim}


def commitment(key: Hotkey, salt: str = "salt", fork: str = FORK) -> dict[str, Any]:
    digest = protocol.commitment_hash(salt, fork)
    body = {"commitment_hash": digest, "target_sequence_length": 100_000}
    return {"miner_hotkey": key.hotkey, "signature": key.sign(digest), **body}


def revelation(
    key: Hotkey, submission_id: int, salt: str = "salt", fork: str = FORK
) -> dict[str, Any]:
    body = submission(key, fork=fork)
    del body["target_sequence_length"]
    return {**body, "submission_id": submission_id, "commitment_salt": salt}


def bound(key: Hotkey, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body in version 2, with the hotkey's signature of all fields."""
    body = body | {"signature": "-", "version": 2}
    text = protocol.bound_text(route, BOUND[route](**body))
    return body | {"signature": key.sign(text)}


@cache
def new_database() -> bytes:
    """Return an empty database; to copy it is faster than all migrations for each test."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "api.db")
        Storage(f"sqlite:///{file}").close()
        return file.read_bytes()


@contextmanager
def serve(folder: Path, **options: Any) -> Iterator[LiveApi]:
    """Run the API in a thread on a free port.

    Args:
        options: settings of `Settings`, and arguments of `Api`.
    """
    values: dict[str, Any] = {
        "database_url": f"sqlite:///{folder / 'api.db'}",
        "blocks_until_reveal": BLOCKS,
        "validator_hotkeys": (VALIDATOR.hotkey,),
        "rate_limit": 0,
        "allow_file_forks": True,
        "clock": Clock(),
        **options,
    }
    clock, file = values["clock"], Path(str(values["database_url"]).removeprefix("sqlite:///"))
    if file.suffix == ".db" and not file.exists():
        file.write_bytes(new_database())
    of_api = {name: values.pop(name) for name in list(values) if name not in Settings.model_fields}
    url: Queue[str] = Queue()
    app = create_app(Api(Settings(**values), **of_api))
    server = Server(app, lambda host, port: url.put(f"http://{host}:{port}"))
    sockets = [listen("127.0.0.1", 0, ("HOST", "PORT"))]
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    live = LiveApi(url.get(timeout=HANG), clock)
    try:
        yield live
    finally:
        live.http.close()
        server.should_exit = True
        thread.join(HANG)
        assert not thread.is_alive(), "the server did not stop"
