"""Who is calling: header signatures, body signatures, validators, addresses, the rate limit."""

from __future__ import annotations

import ipaddress
import json
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, HTTPException, Request

from neurons import protocol
from neurons.identity import verify
from neurons.protocol import RevealRequest, SubmitRequest

WINDOW_SECONDS = 60.0
_SS58 = re.compile(r"[1-9A-HJ-NP-Za-km-z]{46,49}")
_HEX = re.compile(r"(?:[0-9A-Fa-f]{2})+")


def authenticated(request: Request) -> str:
    """Return the hotkey whose signature of its own address the headers carry, else 401."""
    hotkey = request.headers.get(protocol.HOTKEY_HEADER)
    signature = request.headers.get(protocol.SIGNATURE_HEADER)
    if not hotkey or not signature:
        raise HTTPException(401, "Missing Hotkey or Signature headers")
    if not _HEX.fullmatch(signature):
        raise HTTPException(401, "Invalid signature format. Expected hex string")
    if not _SS58.fullmatch(hotkey):
        raise HTTPException(401, "Authentication error: the Hotkey header is not an ss58 address")
    if not verify(hotkey, hotkey, signature):
        raise HTTPException(401, "Invalid signature")
    return hotkey


Hotkey = Annotated[str, Depends(authenticated)]


def validator(request: Request, hotkey: Hotkey) -> str:
    """Return the caller's hotkey when it is one of the validators', else 403."""
    if not is_validator(request, hotkey):
        raise HTTPException(403, "Only validators may do this")
    return hotkey


def limited(request: Request, hotkey: Hotkey) -> str:
    """Return the caller's hotkey when it has not sent too much, else 429 with Retry-After."""
    config = request.app.state.config
    if config.limit_loopback or not is_loopback(client_ip(request)):
        wait = request.app.state.limiter.wait(hotkey)
        if wait > 0:
            raise HTTPException(
                429,
                f"Rate limit exceeded. Max {config.rate_limit} requests per "
                f"{WINDOW_SECONDS:.0f} seconds.",
                headers={"Retry-After": str(int(wait) + 1)},
            )
    return hotkey


ValidatorHotkey = Annotated[str, Depends(validator)]
LimitedHotkey = Annotated[str, Depends(limited)]


def is_validator(request: Request, hotkey: str) -> bool:
    """Tell whether the hotkey is listed in VALIDATOR_HOTKEYS."""
    return hotkey in request.app.state.config.validator_hotkeys


def from_validator(request: Request) -> bool:
    """Tell whether a call that is open to all was made by a validator."""
    try:
        return is_validator(request, authenticated(request))
    except HTTPException:
        return False


def client_ip(request: Request) -> str:
    """Return the caller's address: the socket's, or a trusted proxy's word for it (uvicorn's)."""
    return request.client.host if request.client else ""


def is_loopback(address: str) -> bool:
    """Tell whether the address is this machine's own."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def check_same_hotkey(claimed: str, hotkey: str) -> None:
    """Refuse a body that speaks for another hotkey than the headers prove."""
    if claimed != hotkey:
        raise HTTPException(403, "Hotkey mismatch")


def check_signed(hotkey: str, signature: str, *texts: str) -> None:
    """Refuse a body whose `signature` is the hotkey's for none of `texts`."""
    if not any(verify(hotkey, text, signature) for text in texts):
        raise HTTPException(401, "Invalid signature")


def signed_texts(body: SubmitRequest | RevealRequest) -> list[str]:
    """Return the texts that `body.signature` may sign.

    The subnet's reference miner keeps its benchmarks under integers and so signs the lengths in
    numeric order, and signs nothing in their place when it sends none.
    """
    repo_hash = body.repo_hash if isinstance(body, SubmitRequest) else None
    start = f"{body.fork_url}{body.commit_hash}{body.tokens_per_sec}"
    canonical = protocol.submission_text(
        body.fork_url, body.commit_hash, body.tokens_per_sec, body.benchmarks, repo_hash
    )
    if body.benchmarks is None:
        return [canonical, f"{start}{repo_hash or ''}"]
    if not all(length.isdecimal() for length in body.benchmarks):
        return [canonical]
    numeric = {int(length): figures for length, figures in body.benchmarks.items()}
    return [canonical, f"{start}{json.dumps(numeric, sort_keys=True)}{repo_hash or ''}"]


class RateLimiter:
    """At most `limit` calls of a hotkey in any minute, counted in this process's memory."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._calls: dict[str, deque[float]] = {}
        self._lock = threading.Lock()

    def wait(self, hotkey: str) -> float:
        """Count a call; return 0, or the seconds until the hotkey may call (not counted then)."""
        if not self._limit:
            return 0.0
        with self._lock:
            now = self._clock()
            self._forget(now - WINDOW_SECONDS)
            calls = self._calls.setdefault(hotkey, deque())
            if len(calls) >= self._limit:
                return calls[0] + WINDOW_SECONDS - now
            calls.append(now)
            return 0.0

    def _forget(self, before: float) -> None:
        """Drop what the window has left behind, so that memory follows the traffic."""
        for hotkey, calls in list(self._calls.items()):
            while calls and calls[0] <= before:
                calls.popleft()
            if not calls:
                del self._calls[hotkey]
