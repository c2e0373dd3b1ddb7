"""What a network, a gateway or a tired server does to a reply, drawn by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

POST_SHARE = 0.5
GET_SHARE = 0.1
"""Shares of the requests that meet a fault; the miner looks far more often than it acts."""

IN_A_ROW = 3
"""After so many faults of one route the next request of it passes, so that a cycle ends."""

DELAY_SECONDS = 3.0
LATE_SECONDS = 40.0
"""Longer than the miner waits for a reply: it arrives after the miner has given it up."""
OVERSIZE_BYTES = 2**21
"""Twice what the miner reads of a reply."""


@dataclass(frozen=True)
class Reply:
    """An HTTP reply as bytes and headers.

    Attributes:
        declared: the Content-Length when it is not the body's own: more than comes.
    """

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    declared: int | None = None


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    Attributes:
        name: as the report counts it.
        forwarded: whether the server carries the request out.
        change: makes the reply of the server's (None when it was not asked); returns None to
            break the connection.
        delay: seconds before anything else.
    """

    name: str
    forwarded: bool
    change: Callable[[Reply | None], Reply | None]
    delay: float = 0.0


def _page(status: int, words: str) -> Reply:
    page = (
        f"<html>\r\n<head><title>{status} {words}</title></head>\r\n<body>\r\n"
        f"<center><h1>{status} {words}</h1></center>\r\n<hr><center>nginx</center>\r\n"
        "</body>\r\n</html>\r\n"
    )
    return Reply(status, page.encode(), {"Content-Type": "text/html"})


def _instead(name: str, reply: Reply, forwarded: bool = False) -> Fault:
    return Fault(name, forwarded, lambda _: reply)


def _spoilt(name: str, spoil: Callable[[Reply], Reply | None]) -> Fault:
    return Fault(name, True, lambda reply: spoil(reply) if reply else None)


_JSON = {"Content-Type": "application/json"}
_INTERNAL = Reply(500, json.dumps({"detail": "database is locked"}).encode(), _JSON)
_BAD_GATEWAY = _page(502, "Bad Gateway")

FAULTS: tuple[Fault, ...] = (
    Fault("dropped before", False, lambda _: None),
    _spoilt("reply dropped", lambda _: None),
    _spoilt("reply dropped", lambda _: None),  # twice as often: the dangerous one
    Fault("delayed", True, lambda reply: reply, DELAY_SECONDS),
    Fault("carried out late", True, lambda _: None, LATE_SECONDS),  # a server that wakes up
    _spoilt("garbled", lambda r: Reply(r.status, r.body.replace(b'"', b"'", 3) + b"}", r.headers)),
    _spoilt(
        "truncated", lambda r: Reply(r.status, r.body[: len(r.body) // 2], r.headers, len(r.body))
    ),
    _spoilt("oversized", lambda r: Reply(r.status, r.body + b" " * OVERSIZE_BYTES, r.headers)),
    _instead("404 page", _page(404, "Not Found")),
    _instead("403 page", _page(403, "Forbidden")),
    _instead("405 page", _page(405, "Not Allowed")),
    _instead("502 page", _BAD_GATEWAY),
    _instead("502 page after", _BAD_GATEWAY, forwarded=True),
    _instead(
        "429", Reply(429, b'{"detail":"Rate limit exceeded."}', {**_JSON, "Retry-After": "2"})
    ),
    _instead("503", Reply(503, b"", {"Retry-After": "3"})),
    _instead("500", _INTERNAL),
    _instead("500 after", _INTERNAL, forwarded=True),
    _instead("redirect", Reply(302, b"", {"Location": "https://elsewhere.invalid/login"})),
)


class FaultPlan:
    """Draws a fault, or none, for each request; the same seed draws the same in the same order.

    Args:
        seed: of the draws.
        names: the faults to draw from; without them, all.
        post_share, get_share: how many of the requests meet one.
    """

    def __init__(
        self,
        seed: int,
        names: Collection[str] = (),
        *,
        post_share: float = POST_SHARE,
        get_share: float = GET_SHARE,
    ) -> None:
        self._random = random.Random(seed)
        self._faults = [fault for fault in FAULTS if not names or fault.name in names]
        self._shares = {"POST": post_share, "GET": get_share}
        self._in_a_row: dict[str, int] = {}

    def draw(self, method: str, route: str) -> Fault | None:
        """Return what happens to this request; None when it passes as it is."""
        hit = self._random.random() < self._shares.get(method, 0.0)
        fault = self._random.choice(self._faults)
        if not hit or self._in_a_row.get(route, 0) >= IN_A_ROW:
            self._in_a_row[route] = 0
            return None
        self._in_a_row[route] = self._in_a_row.get(route, 0) + 1
        return fault
