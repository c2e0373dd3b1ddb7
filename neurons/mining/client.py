"""The miner's side of the validator API: one method a call, one exception type an outcome."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import httpx
import stamina
from pydantic import BaseModel

from neurons.mining.outcomes import (
    ProtocolFault,
    ReplyLost,
    ServerFault,
    Unreachable,
    fault_of,
    http_date,
)
from neurons.mining.wire import Limiter, Reply, check_address, parse_reply, raise_transport
from neurons.observe import get_logger
from neurons.protocol import (
    HOTKEY_HEADER,
    SIGNATURE_HEADER,
    CommitReply,
    CommitRequest,
    Message,
    PendingReveals,
    RegisterReply,
    RegisterRequest,
    RevealReply,
    RevealRequest,
    Round,
    SubmissionStats,
    SubmitReply,
    SubmitRequest,
    Weights,
)

BODY_BYTES = 2**20
CONNECT_SECONDS = 10.0
REPLY_SECONDS = 30.0
REQUESTS_A_MINUTE = 9
"""One under the documented limit of 10."""
CLOCK_SECONDS = 30.0
QUICK_ATTEMPTS = 3
QUICK_SECONDS = 8.0

log = get_logger("client")


class Signer(Protocol):
    """What the client needs of an identity."""

    @property
    def hotkey(self) -> str:
        """The ss58 address."""

    def sign(self, text: str) -> str:
        """Return the signature of `text` in hex, without 0x."""


class ApiClient:
    """Calls of one validator API by one hotkey.

    Every method raises the types of `neurons.mining.outcomes`. GETs are tried a few times; a POST
    only when it certainly did not reach the server. Longer pauses are the caller's.

    Args:
        base_url: https, or http on this machine.
        identity: signs the two headers, which go to the four routes that need them only.
        transport: replaces the network in tests.
        wait: the limiter's wait, so that a stop ends it.
        now: Unix seconds of this machine, compared with the server's Date.

    Raises:
        ConfigError: the address would show the signature header to others.
    """

    def __init__(
        self,
        base_url: str,
        identity: Signer,
        *,
        transport: httpx.BaseTransport | None = None,
        wait: Callable[[float], object] = time.sleep,
        now: Callable[[], float] = time.time,
        reply_seconds: float = REPLY_SECONDS,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.hotkey = identity.hotkey
        self.on_loopback = check_address(self.base_url)
        self.clock_offset: float | None = None
        self._identity, self._now, self._reply_seconds = identity, now, reply_seconds
        self._signature: str | None = None
        self._limit = None if self.on_loopback else Limiter(REQUESTS_A_MINUTE, wait)
        self._http = httpx.Client(
            base_url=self.base_url,
            transport=transport,
            timeout=httpx.Timeout(reply_seconds, connect=CONNECT_SECONDS),
            follow_redirects=False,
            trust_env=not self.on_loopback,  # a proxy has no business with this machine's server
            headers={"Accept": "application/json"},
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def health(self) -> None:
        """GET /health; returns when the server is up."""
        self._get("/health", Message)

    def current_round(self) -> Round:
        """GET /get_current_round, which also starts a round where none is active."""
        return self._get("/get_current_round", Round)

    def pending_reveals(self) -> PendingReveals:
        """GET /pending_reveals: every open commitment, and the server's block."""
        return self._get("/pending_reveals", PendingReveals)

    def stats(self, limit: int) -> SubmissionStats:
        """GET /get_submission_stats with up to `limit` submissions that await a validator."""
        return self._get("/get_submission_stats", SubmissionStats, {"limit": limit})

    def weights(self, round_id: int) -> Weights:
        """GET /get_weights of one round, best rank first."""
        return self._get("/get_weights", Weights, {"round_id": round_id})

    def register(self, model_name: str, league: str) -> RegisterReply:
        """POST /register_miner; a second time is harmless."""
        body = RegisterRequest(hotkey=self.hotkey, model_name=model_name, league=league)
        return self._post("/register_miner", body, RegisterReply)

    def commit(self, request: CommitRequest) -> CommitReply:
        """POST /commit_submission."""
        return self._post_in_round("/commit_submission", request, CommitReply)

    def reveal(self, request: RevealRequest) -> RevealReply:
        """POST /reveal_submission."""
        return self._post("/reveal_submission", request, RevealReply)

    def submit(self, request: SubmitRequest) -> SubmitReply:
        """POST /submit_kernel, which the server does not recognise when it comes twice."""
        return self._post_in_round("/submit_kernel", request, SubmitReply)

    def _get(self, route: str, reply: type[Reply], query: Mapping[str, int] | None = None) -> Reply:
        retried = (Unreachable, ReplyLost, ServerFault)
        for attempt in _quick_attempts(retried):
            with attempt:
                return self._exchange("GET", route, reply, query=query)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _post(self, route: str, body: BaseModel, reply: type[Reply]) -> Reply:
        for attempt in _quick_attempts((Unreachable,)):
            with attempt:
                return self._exchange("POST", route, reply, body=body)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _post_in_round(self, route: str, body: BaseModel, reply: type[Reply]) -> Reply:
        """POST; when no round is active, start one and POST once more.

        The public server then fails on its own new round before it stores anything, with a 500
        that names `round_number`.
        """
        try:
            return self._post(route, body, reply)
        except ServerFault as fault:
            if "round_number" not in fault.detail:
                raise
        log.warning("no round is active on the server; asking for one")
        self.current_round()
        return self._post(route, body, reply)

    def _exchange(
        self,
        method: str,
        route: str,
        reply: type[Reply],
        *,
        query: Mapping[str, int] | None = None,
        body: BaseModel | None = None,
    ) -> Reply:
        if self._limit:
            self._limit()
        content = headers = None
        if body is not None:
            values = body.model_dump(mode="json", exclude_none=True)
            content = json.dumps(values, allow_nan=False).encode()
            headers = {"Content-Type": "application/json", **self._credentials()}
        request = self._http.build_request(
            method, route, params=query, content=content, headers=headers
        )
        try:
            response = self._http.send(request, stream=True)
            try:
                data = self._read(route, response)
            finally:
                response.close()
        except httpx.HTTPError as error:
            raise_transport(self.base_url, route, error)
        self._note_clock(response.headers.get("Date"))
        if not response.is_success:
            raise fault_of(route, response.status_code, response.headers, data, self._now())
        return parse_reply(route, data, reply)

    def _credentials(self) -> dict[str, str]:
        if self._signature is None:
            self._signature = self._identity.sign(self.hotkey)
        return {HOTKEY_HEADER: self.hotkey, SIGNATURE_HEADER: self._signature}

    def _read(self, route: str, response: httpx.Response) -> bytes:
        """Return the body within one deadline; httpx's own starts anew with every packet."""
        deadline = time.monotonic() + self._reply_seconds
        data = bytearray()
        for piece in response.iter_bytes():
            data += piece
            if len(data) > BODY_BYTES:
                raise ProtocolFault(f"{route} answered with more than {BODY_BYTES} bytes")
            if time.monotonic() > deadline:
                raise ReplyLost(f"{route} was still answering after {self._reply_seconds:g} s")
        return bytes(data)

    def _note_clock(self, date: str | None) -> None:
        moment = http_date(date) if date else None
        if moment is None:
            return
        first = self.clock_offset is None
        self.clock_offset = moment - self._now()
        if first and abs(self.clock_offset) > CLOCK_SECONDS:
            log.warning(
                "this machine's clock and the server's differ; set it with NTP",
                server_ahead_seconds=round(self.clock_offset),
            )


def _quick_attempts(on: tuple[type[Exception], ...]) -> Any:
    # retry_context, not the decorator: its log line would repeat the call's arguments.
    return stamina.retry_context(
        on=on, attempts=QUICK_ATTEMPTS, timeout=QUICK_SECONDS, wait_max=2.0, wait_jitter=0.5
    )
