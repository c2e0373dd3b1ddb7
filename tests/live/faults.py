"""Faults of a network, a gateway or a server, drawn by a seed."""

import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

SHARES = {"POST": 0.5, "GET": 0.1}
"""Shares of the requests that meet a fault; the miner sends far more GETs than POSTs."""

IN_A_ROW = 3
"""Most consecutive faults of one route, so that a cycle ends."""

DELAY_SECONDS = 3.0
LATE_SECONDS = 40.0
"""Longer than the miner waits for a reply."""
OVERSIZE_BYTES = 2**21
"""Twice the miner's limit on most replies."""


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    declared: int | None = None  # a Content-Length that exceeds the body's length


@dataclass(frozen=True)
class Fault:
    name: str  # in the report
    forwarded: bool  # whether the server receives the request
    # maps the server's reply (None without one) to the miner's; None breaks the connection
    change: Callable[[Reply | None], Reply | None]
    delay: float = 0.0  # seconds before anything else


def _page(status: int, words: str) -> Reply:
    page = (
        f"<html>\r\n<head><title>{status} {words}</title></head>\r\n<body>\r\n"
        f"<center><h1>{status} {words}</h1></center>\r\n<hr><center>nginx</center>\r\n"
        "</body>\r\n</html>\r\n"
    )
    return Reply(status, page.encode(), {"Content-Type": "text/html"})


def _replaced(name: str, reply: Reply, forwarded: bool = False) -> Fault:
    return Fault(name, forwarded, lambda _: reply)


def _changed(name: str, change: Callable[[Reply], Reply | None]) -> Fault:
    return Fault(name, True, lambda reply: change(reply) if reply else None)


_JSON = {"Content-Type": "application/json"}
_INTERNAL = Reply(500, json.dumps({"detail": "database is locked"}).encode(), _JSON)
_BAD_GATEWAY = _page(502, "Bad Gateway")

FAULTS: tuple[Fault, ...] = (
    Fault("dropped before", False, lambda _: None),
    _changed("reply dropped", lambda _: None),
    _changed("reply dropped", lambda _: None),  # twice as often, as it is the most dangerous fault
    Fault("delayed", True, lambda reply: reply, DELAY_SECONDS),
    Fault("carried out late", True, lambda _: None, LATE_SECONDS),
    _changed("garbled", lambda r: Reply(r.status, r.body.replace(b'"', b"'", 3) + b"}", r.headers)),
    _changed(
        "truncated", lambda r: Reply(r.status, r.body[: len(r.body) // 2], r.headers, len(r.body))
    ),
    _changed("oversized", lambda r: Reply(r.status, r.body + b" " * OVERSIZE_BYTES, r.headers)),
    _replaced("404 page", _page(404, "Not Found")),
    _replaced("403 page", _page(403, "Forbidden")),
    _replaced("405 page", _page(405, "Not Allowed")),
    _replaced("502 page", _BAD_GATEWAY),
    _replaced("502 page after", _BAD_GATEWAY, forwarded=True),
    _replaced(
        "429", Reply(429, b'{"detail":"Rate limit exceeded."}', {**_JSON, "Retry-After": "2"})
    ),
    _replaced("503", Reply(503, b"", {"Retry-After": "3"})),
    _replaced("500", _INTERNAL),
    _replaced("500 after", _INTERNAL, forwarded=True),
    _replaced("redirect", Reply(302, b"", {"Location": "https://elsewhere.invalid/login"})),
)


class FaultPlan:
    """Draws a fault or none for each request; the same seed gives the same sequence.

    `names` are the faults to draw from; without names, all.
    """

    def __init__(self, seed: int, names: Collection[str] = ()) -> None:
        self._random = random.Random(seed)
        self._faults = [fault for fault in FAULTS if not names or fault.name in names]
        self._in_a_row: dict[str, int] = {}

    def draw(self, method: str, route: str) -> Fault | None:
        """Return the fault of this request; None if it has none."""
        hit = self._random.random() < SHARES.get(method, 0.0)
        fault = self._random.choice(self._faults)
        if not hit or self._in_a_row.get(route, 0) >= IN_A_ROW:
            self._in_a_row[route] = 0
            return None
        self._in_a_row[route] = self._in_a_row.get(route, 0) + 1
        return fault
