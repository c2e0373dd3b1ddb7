"""A fake validator API with the public service's protocol, and any fault on demand."""

import hashlib
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from tests.servers import Handler, Server, serving

COMMIT, REVEAL, SUBMIT = "/commit_submission", "/reveal_submission", "/submit_kernel"
STATS, PENDING = "/get_submission_stats", "/pending_reveals"
ROUND, WEIGHTS = "/get_current_round", "/get_weights"


@dataclass(frozen=True)
class Fault:
    """The reply to one request in place of the normal one."""

    status: int | None = None  # None breaks the connection without a reply
    body: str | bytes = ""  # a str is sent as `detail`
    headers: dict[str, str] = field(default_factory=dict)
    stored: bool = False  # whether the request has its effect first


LOST = Fault(stored=True)
RESET = Fault()


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: Any


@dataclass
class Answer:
    """A reply; status None means that the connection breaks."""

    status: int | None
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class FakeValidatorApi:
    """The server's state, and the faults of the next requests by path.

    Every read of /pending_reveals advances the block by one, so that tests need not wait.
    """

    def __init__(self, blocks_until_reveal: int = 2) -> None:
        self.blocks_until_reveal = blocks_until_reveal
        self.block = 1000
        self.round_id = 1
        self.registered: set[str] = set()
        self.rows: list[dict[str, Any]] = []
        self.weights: list[dict[str, Any]] = []
        self.performers: list[dict[str, Any]] = []
        self.verdict: float | None = 1.0  # reading the queue gives revealed rows this score
        self.lists_unrevealed = True  # whether the queue shows unrevealed commitments
        self.judges_early = False  # whether validators judge them
        # whether a validator fetches unrevealed commitments and scores them 0 after their reveal
        self.fetches_ahead = False
        self.shows_scores = True  # the public service shows none
        self.databases = 1  # the number of databases so far
        self.clock: Callable[[], float] = time.time
        # how it writes the times, and the hashes in its lists
        self.spell: Callable[[str], str] = str
        self.spell_hash: Callable[[str], str] = str
        self.judging_seconds = 0.0  # the time that a validator takes to measure a submission
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        # by path, functions to call before and after a request has its effect
        self.before: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], object]] = {}
        self.requests: list[Request] = []
        self.hash_mismatches = 0
        self.commit_route = (405, "Method Not Allowed")  # the reply to GET
        self._lock = threading.Lock()

    def count(self, path: str) -> int:
        return sum(request.path == path for request in self.requests)

    def body_of(self, path: str) -> Any:
        return next(request.body for request in self.requests if request.path == path)

    def wipe(self) -> None:
        """Empty the database, as a redeployment without a disk does."""
        self.databases += 1
        self.round_id = 1
        self.registered, self.rows, self.weights, self.performers = set(), [], [], []

    def wipe_once(self) -> None:
        if self.databases == 1:
            self.wipe()

    def add_foreign(self, count: int = 1, *, revealed: bool = True, **values: Any) -> None:
        """Store submissions, by default of another miner."""
        for _ in range(count):
            row = self._add({"miner_hotkey": "5Other", "target_sequence_length": 1})
            row.update(is_revealed=revealed, commitment_hash="f" * 64, **values)

    def handle(self, request: Request) -> Answer:
        """Return the reply to one request; a GET of a POST's route only shows whether it exists."""
        if (request.method, request.path) == ("GET", COMMIT):
            return _refuse(*self.commit_route)
        with self._lock:
            self.requests.append(request)
            fault = self.faults[request.path].popleft() if self.faults[request.path] else None
            if fault is None or fault.stored:
                answer = self._carry_out(request)
                if fault is None:
                    return answer
            body = fault.body
            if isinstance(body, str):
                body = json.dumps({"detail": body}).encode()
            return Answer(fault.status, body, dict(fault.headers))

    def _carry_out(self, request: Request) -> Answer:
        routine = getattr(self, "_" + request.path.strip("/"), None)
        if routine is None:
            return _refuse(404, "Not Found")
        signed = request.path in (COMMIT, REVEAL, SUBMIT)
        if signed and request.headers.get("hotkey") not in self.registered:
            return _refuse(404, "Miner not registered")
        self.before.get(request.path, lambda: None)()
        answer = routine(request)
        self.after.get(request.path, lambda: None)()
        return answer if isinstance(answer, Answer) else _ok(answer)

    def _health(self, request: Request) -> Any:
        return {"status": "ok"}

    def _register_miner(self, request: Request) -> Any:
        self.registered.add(request.headers["hotkey"])
        return {"status": "registered", **request.body}

    def _get_current_round(self, request: Request) -> Any:
        return {
            "id": self.round_id,
            "round_number": self.round_id,
            "start_time": self.spell(
                f"2026-01-{self.databases:02d}T00:00:{self.round_id % 60:02d}"
            ),
            "end_time": datetime.fromtimestamp(self.clock() + 100, timezone.utc).isoformat(),
            "status": "active",
            "time_remaining_seconds": 100,
            "total_submissions": len(self.rows),
        }

    def _commit_submission(self, request: Request) -> Any:
        body = request.body
        if any(row["commitment_hash"] == body["commitment_hash"] for row in self.rows):
            return _refuse(409, "Commitment hash already exists. Use a different salt.")
        row = self._add(body)
        row["commitment_hash"] = body["commitment_hash"]
        row["reveal_block"] = self.block + self.blocks_until_reveal
        row["is_revealed"] = False
        return {
            "submission_id": row["id"],
            "commitment_hash": body["commitment_hash"],
            "reveal_block": row["reveal_block"],
            "estimated_reveal_time": "2026-01-01T00:20:00",
            "message": "Commitment accepted.",
        }

    def _reveal_submission(self, request: Request) -> Any:
        body = request.body
        row = next((row for row in self.rows if row["id"] == body["submission_id"]), None)
        if row is None or row["miner_hotkey"] != body["miner_hotkey"]:
            return _refuse(404, "Submission not found")
        if row["is_revealed"]:
            return _refuse(409, "Submission already revealed")
        if self.block < row["reveal_block"]:
            left = row["reveal_block"] - self.block
            return _refuse(425, f"Cannot reveal yet. Wait {left} blocks (~0 minutes)")
        text = body["commitment_salt"] + body["fork_url"]
        if hashlib.sha256(text.encode()).hexdigest() != row["commitment_hash"]:
            self.hash_mismatches += 1
            return _refuse(400, "Commitment verification failed. Hash mismatch.")
        row.update({key: body.get(key) for key in ("fork_url", "commit_hash", "tokens_per_sec")})
        row["is_revealed"], row["revealed_at"] = True, self.clock()
        if row["validated"]:  # premature: the public API ranks it by its claim
            self.weights.append({"uid": 0, "hotkey": row["miner_hotkey"], "weight": 0.6})
        shown = ("miner_hotkey", "fork_url", "commit_hash", "is_revealed")
        message = "Submission revealed successfully."
        return {"submission_id": row["id"], "message": message, **{k: row[k] for k in shown}}

    def _submit_kernel(self, request: Request) -> Any:
        row = self._add(request.body)
        row.update({k: request.body[k] for k in ("fork_url", "commit_hash", "tokens_per_sec")})
        return {"submission_id": row["id"], "created_at": row["created_at"]}

    def _pending_reveals(self, request: Request) -> Any:
        self.block += 1
        rows = [
            {
                "submission_id": row["id"],
                "miner_hotkey": row["miner_hotkey"],
                "commitment_hash": self.spell_hash(row["commitment_hash"][:16] + "..."),
                "reveal_block": row["reveal_block"],
                "blocks_remaining": max(0, row["reveal_block"] - self.block),
                "can_reveal": self.block >= row["reveal_block"],
                "created_at": self.spell(row["created_at"]),
            }
            for row in self.rows
            if not row["is_revealed"]
        ]
        return {"current_block": self.block, "pending_reveals": rows}

    def _get_submission_stats(self, request: Request) -> Any:
        limit = int(request.query.get("limit", ["50"])[0])
        if any(row["tokens_per_sec"] != row["tokens_per_sec"] for row in self.rows):
            return _refuse(500, "Out of range float values are not JSON compliant: nan")
        queue = [
            row
            for row in reversed(self.rows)
            if not row["validated"] and (row["is_revealed"] or self.lists_unrevealed)
        ]
        answer = {
            "total_submissions": len(self.rows),
            "recent_submissions": [self._listed(row) for row in queue[:limit]],
            "stats": {},
            "top_performers": [self._listed(row) for row in self.performers],
        }
        if self.verdict is not None:
            for row in queue:
                if row["is_revealed"] and row["fetched"]:
                    row["judged_early"] = True
                    self.judge(row, 0.0)
                elif row["is_revealed"]:
                    if self.clock() - row["revealed_at"] >= self.judging_seconds:
                        self.judge(row, self.verdict)
                elif self.fetches_ahead:
                    row["fetched"] = True
                elif self.judges_early:
                    row["validated"] = row["judged_early"] = True  # score 0: nothing to clone
        return answer

    def _get_weights(self, request: Request) -> Any:
        wanted = int(request.query["round_id"][0])
        rows = self.weights if wanted == self.round_id else []
        return {"epoch": 1, "weights": rows}

    def _listed(self, row: dict[str, Any]) -> dict[str, Any]:
        shown = {**row, "created_at": self.spell(row["created_at"])}
        if row.get("commit_hash"):
            shown["commit_hash"] = self.spell_hash(row["commit_hash"])
        return shown

    def judge(self, row: dict[str, Any], score: float) -> None:
        """Store a validator's verdict on one row of the queue."""
        row["validated"] = True
        rank = len(self.weights) + 1 if score > 0 or not self.shows_scores else None
        if rank:
            self.weights.append({"uid": 0, "hotkey": row["miner_hotkey"], "weight": 0.6})
        if not self.shows_scores:
            return
        self.performers.append({**row, "rank": rank, "score": score})

    def _add(self, body: dict[str, Any]) -> dict[str, Any]:
        row = {
            "id": len(self.rows) + 1,
            **{name: body[name] for name in ("miner_hotkey", "target_sequence_length")},
            "commitment_hash": "",
            **dict.fromkeys(("reveal_block", "tokens_per_sec"), 0),
            **dict.fromkeys(("fork_url", "commit_hash")),
            **dict.fromkeys(("validated", "judged_early", "fetched"), False),
            "is_revealed": True,
            "revealed_at": self.clock(),
            "created_at": datetime.fromtimestamp(self.clock(), timezone.utc)
            .replace(tzinfo=None)
            .isoformat(),
        }
        self.rows.append(row)
        return row


def _ok(value: Any) -> Answer:
    return Answer(200, json.dumps(value).encode())


def _refuse(status: int, detail: str) -> Answer:
    return Answer(status, json.dumps({"detail": detail}).encode())


class _Server(Server):
    fake_api: FakeValidatorApi
    date: str | None = None


class _Handler(Handler):
    server: _Server

    def serve(self) -> None:
        parts, body = urlsplit(self.path), self.read_body()
        answer = self.server.fake_api.handle(
            Request(
                self.command,
                parts.path,
                parse_qs(parts.query),
                {key.lower(): value for key, value in self.headers.items()},
                json.loads(body) if body else None,
            )
        )
        if answer.status is None:
            self.reset()
            return
        date = self.server.date or self.date_time_string()
        headers = {"Content-Type": "application/json", "Date": date, **answer.headers}
        self.send(answer.status, answer.body, headers)


def respond(fake_api: FakeValidatorApi, request: httpx.Request) -> httpx.Response:
    """Answer a request of an httpx.MockTransport, or raise a ReadError."""
    headers = {key.lower(): value for key, value in request.headers.items()}
    body = json.loads(request.content) if request.content else None
    query = {key: [value] for key, value in request.url.params.items()}
    reply = fake_api.handle(Request(request.method, request.url.path, query, headers, body))
    if reply.status is None:
        raise httpx.ReadError("connection reset", request=request)
    return httpx.Response(reply.status, content=reply.body, headers=reply.headers)


@contextmanager
def serve(fake_api: FakeValidatorApi, date: str | None = None) -> Iterator[str]:
    server = _Server(_Handler)
    server.fake_api, server.date = fake_api, date
    with serving(server):
        yield server.url
