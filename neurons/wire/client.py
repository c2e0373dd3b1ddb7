"""The miner's client of the validator API: a method per call, an exception type per outcome."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import stamina
from pydantic import BaseModel, Field, field_validator

from neurons.runtime.errors import Retry
from neurons.runtime.identity import Identity
from neurons.wire import protocol
from neurons.wire.connection import REPLY_SECONDS, Connection, Query, Reply
from neurons.wire.outcomes import ReadRefused, Refused, ReplyLost, ServerFault, Unreachable

REQUESTS_A_MINUTE = 9
"""One less than the documented limit of 10."""
LIST_BYTES = 2**23
"""Limit in bytes on a reply that lists all miners' rows, enough for 35,000 open commitments."""
ROUTE_STATUSES = {404: False, 405: True}
"""Whether the server has a route that accepts only POST, by the status of its reply to GET."""
QUICK_ATTEMPTS = 3
QUICK_SECONDS = 8.0
_QUICKLY = stamina.RetryingCaller(
    attempts=QUICK_ATTEMPTS, timeout=QUICK_SECONDS, wait_max=2.0, wait_jitter=0.5
)

UNSIGNED = "-"
"""The signature of a request until `ApiClient` signs it."""


class Queue(protocol.Message):
    """Reply of GET /get_submission_stats; of other hotkeys' rows only the id is kept."""

    total_submissions: int  # required, because an empty object is not an empty queue
    recent_submissions: protocol.Rows[protocol.QueuedSubmission | int | None] = Field(
        default_factory=list
    )
    top_performers: protocol.Rows[protocol.Performer | int | None] = Field(default_factory=list)

    @property
    def rows(self) -> list[protocol.QueuedSubmission]:
        """This hotkey's submissions that have no verdict yet."""
        rows = [
            row for row in self.recent_submissions if isinstance(row, protocol.QueuedSubmission)
        ]
        return [row for row in rows if not row.validated]

    @property
    def performers(self) -> list[protocol.Performer]:
        return [row for row in self.top_performers if isinstance(row, protocol.Performer)]

    @property
    def listed(self) -> list[int]:
        """The numbers of all listed submissions, newest first; -1 for a row without a number."""
        rows = self.recent_submissions
        numbers = [row.id if isinstance(row, protocol.QueuedSubmission) else row for row in rows]
        return [-1 if number is None else number for number in numbers]


class Limiter:
    """Allows at most `count` requests in any minute, and delays further ones by `wait`."""

    def __init__(
        self,
        count: int,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sent: deque[float] = deque(maxlen=count)
        self._wait, self._clock = wait, clock

    def __call__(self) -> None:
        if len(self._sent) == self._sent.maxlen:
            self._wait(max(0.0, self._sent[0] + 60.0 - self._clock()))
        self._sent.append(self._clock())


class ApiClient(Connection):
    """Calls of one validator API by one hotkey.

    Methods raise the exceptions of `neurons.wire.outcomes`. A GET is tried up to QUICK_ATTEMPTS
    times, a POST again only if it certainly did not reach the server. Only POSTs have the headers
    with the hotkey and its signature. The client also signs the claims that it sends, in the wire
    version of the server. `wait` pauses for the rate limiter, and may raise `Stopped`.
    """

    def __init__(
        self,
        base_url: str,
        identity: Identity,
        *,
        transport: httpx.BaseTransport | None = None,
        wait: Callable[[float], object] = time.sleep,
        now: Callable[[], float] = time.time,
        reply_seconds: float = REPLY_SECONDS,
    ) -> None:
        super().__init__(
            base_url, identity, transport=transport, now=now, reply_seconds=reply_seconds
        )
        self._limit = None if self.on_loopback else Limiter(REQUESTS_A_MINUTE, wait)

    def serves_competition(self) -> bool | None:
        """Return whether this API has the route for commitments; None if that is unknown.

        GET is answered with 405 if the route exists, because it accepts only POST; otherwise 404.
        """
        if self._limit:
            self._limit()
        try:
            return ROUTE_STATUSES.get(self.status_of("/commit_submission"))
        except Retry:
            return None

    def current_round(self) -> protocol.Round:
        """GET /get_current_round, which also starts a round if none is active."""
        return self._get("/get_current_round", protocol.Round)

    def pending_reveals(self) -> protocol.PendingReveals:
        """GET /pending_reveals: this hotkey's open commitments, and the server's block.

        The public server cannot filter by hotkey, and lists all hotkeys' rows.
        """
        return self._list("/pending_reveals", _Pending, {"hotkey": self.hotkey})

    def queue(self, limit: int) -> Queue:
        """GET /get_submission_stats with up to `limit` submissions that await a validator."""
        return self._list("/get_submission_stats", Queue, {"limit": limit})

    def queue_place(self, submission_id: int) -> protocol.QueuePlace:
        """GET /queue_place of this project's server."""
        return self._get(f"/queue_place/{submission_id}", protocol.QueuePlace)

    def weights(self, round_id: int) -> protocol.Weights:
        """GET /get_weights of one round, best rank first."""
        return self._get("/get_weights", protocol.Weights, {"round_id": round_id})

    def register(self, model_name: str, league: str) -> protocol.RegisterReply:
        """POST /register_miner; repeating it does no harm."""
        body = protocol.RegisterRequest(hotkey=self.hotkey, model_name=model_name, league=league)
        return self._post("/register_miner", body, protocol.RegisterReply)

    def commit(
        self, commitment: str, target_sequence_length: int, wire_version: int
    ) -> protocol.CommitReply:
        """POST /commit_submission with the hash that `protocol.commitment` returns."""
        request = protocol.CommitRequest(
            miner_hotkey=self.hotkey,
            commitment_hash=commitment,
            target_sequence_length=target_sequence_length,
            signature=UNSIGNED,
        )
        return self._post_signed("/commit_submission", request, wire_version, protocol.CommitReply)

    def reveal(
        self, submission_id: int, salt: str, claim: Mapping[str, Any], wire_version: int
    ) -> protocol.RevealReply:
        """POST /reveal_submission; `claim` has the unsigned fields of a `ClaimRequest`."""
        request = protocol.RevealRequest(
            submission_id=submission_id, commitment_salt=salt, signature=UNSIGNED, **claim
        )
        return self._post_signed("/reveal_submission", request, wire_version, protocol.RevealReply)

    def submit(
        self, target_sequence_length: int, claim: Mapping[str, Any], wire_version: int
    ) -> protocol.SubmitReply:
        """POST /submit_kernel; the server stores a repeated request as another submission."""
        request = protocol.SubmitRequest(
            target_sequence_length=target_sequence_length, signature=UNSIGNED, **claim
        )
        return self._post_signed("/submit_kernel", request, wire_version, protocol.SubmitReply)

    def _post_signed(
        self,
        route: str,
        request: protocol.CommitRequest | protocol.ClaimRequest,
        wire_version: int,
        reply: type[Reply],
    ) -> Reply:
        """POST a request with a signature of all its fields, or in version 1 of some."""
        if wire_version >= protocol.WIRE_VERSION:
            request = request.model_copy(update={"version": protocol.WIRE_VERSION})
            text = protocol.bound_text(route, request)
        elif isinstance(request, protocol.CommitRequest):
            text = request.commitment_hash
        else:
            claim = request.fork_url, request.commit_hash, request.tokens_per_sec
            text = protocol.submission_text(*claim, request.benchmarks)
        signature = self._identity.sign(text)
        return self._post(route, request.model_copy(update={"signature": signature}), reply)

    def _list(self, route: str, reply: type[Reply], query: Query | None = None) -> Reply:
        """GET a list; of other hotkeys' rows only the id is kept, so invalid ones do no harm."""
        return self._get(route, reply, query, each=self._own_or_number, reply_bytes=LIST_BYTES)

    def _own_or_number(self, row: dict[str, Any]) -> object:
        if row.get("miner_hotkey", self.hotkey) == self.hotkey:
            return row
        number = row.get("id")
        return number if type(number) is int else None

    def _get(
        self, route: str, reply: type[Reply], query: Query | None = None, **options: Any
    ) -> Reply:
        retried = (Unreachable, ReplyLost, ServerFault)
        try:
            return _QUICKLY(
                retried, lambda: self._once("GET", route, reply, query=query, **options)
            )
        except Refused as refusal:
            raise ReadRefused(refusal.reason.removesuffix(".")) from None

    def _post(self, route: str, body: BaseModel, reply: type[Reply]) -> Reply:
        return _QUICKLY(
            Unreachable, lambda: self._once("POST", route, reply, body=body, signed=True)
        )

    def _once(self, method: str, route: str, reply: type[Reply], **options: Any) -> Reply:
        if self._limit:
            self._limit()
        return self.exchange(method, route, reply, **options)


class _Pending(protocol.PendingReveals):
    """Reply of GET /pending_reveals, without the ids of other hotkeys' rows."""

    @field_validator("pending_reveals", mode="before")
    @classmethod
    def _own(cls, rows: object) -> object:
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else rows
