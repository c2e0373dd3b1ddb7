"""The miner's side of the validator API: one method a call, one exception type an outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import stamina
from pydantic import BaseModel

from neurons.mining.outcomes import ReplyLost, ServerFault, Unreachable
from neurons.mining.wire import REPLY_SECONDS, Connection, Limiter, Reply, Signer
from neurons.protocol import (
    CommitReply,
    CommitRequest,
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

REQUESTS_A_MINUTE = 9
"""One under the documented limit of 10."""
QUICK_ATTEMPTS = 3
QUICK_SECONDS = 8.0


class ApiClient(Connection):
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
        super().__init__(
            base_url, identity, transport=transport, now=now, reply_seconds=reply_seconds
        )
        self._limit = None if self.on_loopback else Limiter(REQUESTS_A_MINUTE, wait)

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
        return self._post("/commit_submission", request, CommitReply)

    def reveal(self, request: RevealRequest) -> RevealReply:
        """POST /reveal_submission."""
        return self._post("/reveal_submission", request, RevealReply)

    def submit(self, request: SubmitRequest) -> SubmitReply:
        """POST /submit_kernel, which the server does not recognise when it comes twice."""
        return self._post("/submit_kernel", request, SubmitReply)

    def _get(self, route: str, reply: type[Reply], query: Mapping[str, int] | None = None) -> Reply:
        retried = (Unreachable, ReplyLost, ServerFault)
        for attempt in _quick_attempts(retried):
            with attempt:
                return self._once("GET", route, reply, query=query)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _post(self, route: str, body: BaseModel, reply: type[Reply]) -> Reply:
        for attempt in _quick_attempts((Unreachable,)):
            with attempt:
                return self._once("POST", route, reply, body=body, signed=True)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _once(self, method: str, route: str, reply: type[Reply], **options: Any) -> Reply:
        if self._limit:
            self._limit()
        return self.exchange(method, route, reply, **options)


def _quick_attempts(on: tuple[type[Exception], ...]) -> Any:
    # retry_context, not the decorator: its log line would repeat the call's arguments.
    return stamina.retry_context(
        on=on, attempts=QUICK_ATTEMPTS, timeout=QUICK_SECONDS, wait_max=2.0, wait_jitter=0.5
    )
