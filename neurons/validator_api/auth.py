"""Authentication: signatures of headers, bodies and whole requests; the rate limit."""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, HTTPException, Request
from sqlalchemy import delete
from sqlalchemy.orm import Session

from neurons.runtime.identity import verify
from neurons.runtime.values import HOTKEY, LOOPBACK
from neurons.validator_api.competition.bans import ban_key
from neurons.validator_api.competition.rounds import Refusal, utc
from neurons.validator_api.database.tables import UsedNonce
from neurons.wire import protocol
from neurons.wire.protocol import ClaimRequest, CommitRequest, SubmitRequest, bound_text
from neurons.wire.signed_request import NotSigned, check_signed_request

WINDOW_SECONDS = 60.0
"""The rate limit counts a hotkey's calls of the last minute."""

_HEX = re.compile(r"(?:[0-9A-Fa-f]{2})+")


def _claimed(request: Request) -> tuple[str, str]:
    """Return the hotkey and the signature of the headers; raise a 401 if they are malformed."""
    hotkey = request.headers.get(protocol.HOTKEY_HEADER)
    signature = request.headers.get(protocol.SIGNATURE_HEADER)
    if not hotkey or not signature:
        raise HTTPException(401, "Missing Hotkey or Signature headers")
    if not _HEX.fullmatch(signature):
        raise HTTPException(401, "Invalid signature format. Expected hex string")
    if not HOTKEY.fullmatch(hotkey):
        raise HTTPException(401, "Authentication error: the Hotkey header is not an ss58 address")
    return hotkey, signature


class RateLimiter:
    """At most `limit` calls of a hotkey in any minute, counted in this process's memory."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._calls: deque[tuple[float, str]] = deque()  # of all hotkeys, the oldest first
        self._of: dict[str, deque[float]] = {}
        self._lock = threading.Lock()

    def wait(self, hotkey: str) -> float:
        """Count a call and return 0; above the limit, only return the seconds to wait."""
        if not self._limit:
            return 0.0
        with self._lock:
            now = self._clock()
            while self._calls and self._calls[0][0] <= now - WINDOW_SECONDS:  # bounds the memory
                _, oldest = self._calls.popleft()
                self._of[oldest].popleft()
                if not self._of[oldest]:
                    del self._of[oldest]
            own = self._of.setdefault(hotkey, deque())
            if len(own) >= self._limit:
                return own[0] + WINDOW_SECONDS - now
            own.append(now)
            self._calls.append((now, hotkey))
            return 0.0


@dataclass(frozen=True)
class Caller:
    """A miner with a valid signature."""

    hotkey: str
    client: str  # the key under which bans count its failures


async def caller(request: Request) -> Caller:
    """Return the miner; raise a 401 if its Signature header does not sign its Hotkey header.

    Raises a 429 with Retry-After beyond the rate limit.
    """
    hotkey, signature = _claimed(request)
    if not verify(hotkey, hotkey, signature):
        raise HTTPException(401, "Invalid signature")
    api = request.app.state.api
    wait = api.limiter.wait(hotkey)
    if wait > 0:
        raise HTTPException(
            429,
            f"Rate limit exceeded. Max {api.settings.rate_limit} requests per "
            f"{WINDOW_SECONDS:.0f} seconds.",
            headers={"Retry-After": str(int(wait) + 1)},
        )
    address = request.client.host if request.client else None
    return Caller(hotkey, ban_key(address, hotkey) or hotkey)


TheCaller = Annotated[Caller, Depends(caller)]


def check_fork_url(fork_url: str, *, allow_files: bool) -> None:
    """Raise a 400 for an address that is malformed or that other machines cannot clone."""
    try:
        parts = urlsplit(fork_url)
    except ValueError:  # such as https://[
        parts = urlsplit("")
    local = parts.scheme == "file" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
    if allow_files and local and fork_url.isprintable():
        return
    plain = parts.scheme == "https" and parts.hostname and "@" not in parts.netloc
    if not plain or not fork_url.isascii() or not fork_url.isprintable() or " " in fork_url:
        raise HTTPException(
            400,
            "fork_url must be a plain https address; an API with ALLOW_FILE_FORKS=true also "
            "accepts file://, and http:// on this machine",
        )


@dataclass(frozen=True)
class ValidatorCall:
    """A request that a validator has signed as a whole, with times in naive UTC."""

    hotkey: str
    nonce: str
    made_at: datetime
    expires_at: datetime  # from then on its timestamp is refused, so its nonce can be deleted

    def record_nonce(self, session: Session) -> None:
        """Record the nonce; raise a Refusal if it was used before."""
        session.execute(delete(UsedNonce).where(UsedNonce.expires_at <= self.made_at))
        if session.get(UsedNonce, (self.hotkey, self.nonce)) is not None:
            raise Refusal(401, "Nonce was used before")
        session.add(UsedNonce(hotkey=self.hotkey, nonce=self.nonce, expires_at=self.expires_at))
        session.flush()


async def validator(request: Request) -> ValidatorCall:
    """Return the validator's call.

    Raises a 401 without a valid signature of method, path, query, body, nonce and time; a 403 for a
    hotkey that is not a validator's.
    """
    api = request.app.state.api
    _claimed(request)  # refuses malformed headers
    now = api.wall_clock()
    query = request.scope["query_string"].decode("latin-1")
    target = request.url.path + (f"?{query}" if query else "")
    body = await request.body()
    try:
        signed = check_signed_request(request.method, target, request.headers, body, now)
    except NotSigned as error:
        raise HTTPException(401, str(error)) from None
    if not api.is_validator(signed.hotkey):
        raise HTTPException(403, "Only validators may do this")
    return ValidatorCall(signed.hotkey, signed.nonce, utc(now), utc(signed.expires_at))


Validator = Annotated[ValidatorCall, Depends(validator)]


def check_same_hotkey(claimed: str, caller: Caller) -> None:
    """Raise a 403 if the body names another hotkey than the signed headers."""
    if claimed != caller.hotkey:
        raise HTTPException(403, "Hotkey mismatch")


def check_body(route: str, body: CommitRequest | ClaimRequest, caller: Caller) -> None:
    """Raise a 403 if the body is another hotkey's, and a 401 if its signature is wrong.

    In version 2 the signature covers the whole body.
    """
    check_same_hotkey(body.miner_hotkey, caller)
    if body.version is not None:
        texts = [bound_text(route, body)]
    elif isinstance(body, CommitRequest):
        texts = [body.commitment_hash]
    else:
        texts = _public_texts(body)
    if not any(verify(body.miner_hotkey, text, body.signature) for text in texts):
        raise HTTPException(401, "Invalid signature")


def _public_texts(body: ClaimRequest) -> list[str]:
    """Return the texts of which version 1 accepts a signature.

    The public subnet's miner sorts the benchmarks by numeric length, and signs no text in place of
    missing ones. `submission_text` sorts the lengths as texts and signs `{}`.
    """
    repo_hash = body.repo_hash if isinstance(body, SubmitRequest) else None
    start = f"{body.fork_url}{body.commit_hash}{body.tokens_per_sec}"
    canonical = protocol.submission_text(
        body.fork_url, body.commit_hash, body.tokens_per_sec, body.benchmarks, repo_hash
    )
    if body.benchmarks is None:
        return [canonical, f"{start}{repo_hash or ''}"]
    numeric = {int(length): figures for length, figures in body.benchmarks.items()}
    return [canonical, f"{start}{json.dumps(numeric, sort_keys=True)}{repo_hash or ''}"]
