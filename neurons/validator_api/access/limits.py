"""Which miner calls, and how often it may."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, HTTPException, Request

from neurons.validator_api.access.addresses import ban_key
from neurons.validator_api.access.auth import authenticated

WINDOW_SECONDS = 60.0


class RateLimiter:
    """At most `limit` calls of a hotkey in any minute, counted in this process's memory."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._calls: deque[tuple[float, str]] = deque()  # of all hotkeys, the oldest first
        self._of: dict[str, deque[float]] = {}
        self._lock = threading.Lock()

    def wait(self, hotkey: str) -> float:
        """Count a call; return 0, or the seconds until the hotkey may call (not counted then)."""
        if not self._limit:
            return 0.0
        with self._lock:
            now = self._clock()
            self._forget(now - WINDOW_SECONDS)
            own = self._of.setdefault(hotkey, deque())
            if len(own) >= self._limit:
                return own[0] + WINDOW_SECONDS - now
            own.append(now)
            self._calls.append((now, hotkey))
            return 0.0

    def _forget(self, before: float) -> None:
        """Drop what the window has left behind, so that memory follows the traffic."""
        while self._calls and self._calls[0][0] <= before:
            _, hotkey = self._calls.popleft()
            self._of[hotkey].popleft()
            if not self._of[hotkey]:
                del self._of[hotkey]


@dataclass(frozen=True)
class Caller:
    """A miner that has proved who it is and may call now.

    Attributes:
        client: what bans count it under.
    """

    hotkey: str
    client: str


async def caller(request: Request) -> Caller:
    """Return who calls when it has not sent too much: else 401, or 429 with Retry-After."""
    hotkey = authenticated(request)
    api = request.app.state.api
    wait = api.limiter.wait(hotkey)
    if wait > 0:
        raise HTTPException(
            429,
            f"Rate limit exceeded. Max {api.config.rate_limit} requests per "
            f"{WINDOW_SECONDS:.0f} seconds.",
            headers={"Retry-After": str(int(wait) + 1)},
        )
    address = request.client.host if request.client else None
    return Caller(hotkey, ban_key(address, hotkey) or hotkey)


TheCaller = Annotated[Caller, Depends(caller)]
