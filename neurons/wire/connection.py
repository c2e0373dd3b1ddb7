"""The HTTP connection of the miner's and the validator's clients to the API.

It accepts only safe addresses. It checks and parses each reply in bounded memory, because any
server may be hostile.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from neurons.runtime.errors import ConfigError
from neurons.runtime.identity import Identity
from neurons.runtime.network import client_options, untrusted_certificate
from neurons.runtime.observe import get_logger, redact, register_secret
from neurons.runtime.values import LOOPBACK
from neurons.wire.outcomes import (
    ProtocolFault,
    ReplyLost,
    TooLarge,
    Unreachable,
    Untrusted,
    fault_of,
    http_date,
)
from neurons.wire.protocol import HOTKEY_HEADER, SIGNATURE_HEADER
from neurons.wire.signed_request import signed_headers

Query = Mapping[str, str | int | float | bool]
Reply = TypeVar("Reply", bound=BaseModel)
Each = Callable[[dict[str, Any]], object]

ENCODING = "identity"
"""The only content encoding that requests accept: a compressed body could fill the memory."""
FREE_NODES, BYTES_PER_NODE = 1000, 8
"""A reply may have FREE_NODES JSON values, and one more for each BYTES_PER_NODE bytes. The limit is
needed because an empty list takes 30 times as much memory as its text."""
REPLY_BYTES = 2**20
REPLY_SECONDS = 30.0
CONNECT_SECONDS = 10.0
CLOCK_SECONDS = 30.0
"""Difference of the clocks, in seconds, above which a warning is logged."""

log = get_logger("client")


class TimeLimit:
    """A limit on whole requests of a client that sends one at a time.

    httpx's own limits begin again with each packet, so that a server could keep a request waiting
    forever, for example by endless headers or informational replies.
    """

    def __init__(self) -> None:
        self._stream: Any = None  # the client's newest connection
        self.over = False  # whether the limit ended the last request

    def __call__(self, event: str, details: dict[str, Any]) -> None:
        """Store the new connection; httpx calls this object, the extension `trace` of a request."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._stream = details["return_value"]
            if self.over:
                self._shut_down()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Shut the connection down after `seconds` if the block has not ended."""
        self.over = False
        timer = threading.Timer(seconds, self._shut_down)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _shut_down(self) -> None:
        self.over = True
        if self._stream is not None:
            with suppress(OSError):  # it is closed already
                self._stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


class Connection:
    """HTTP to one validator API; each kind of failure has its own exception type.

    Args:
        base_url: https, or http on this machine; others raise a ConfigError.
        identity: signs the headers, which are sent to this host only; None for unsigned calls.
        now: this machine's clock in Unix seconds.
        reply_seconds: limit on the time until a reply begins, and then on the time until it ends.
        reply_bytes: limit on a reply's body.

    Attributes:
        clock_offset: seconds by which the server's clock is ahead; None before the first reply.
    """

    def __init__(
        self,
        base_url: str,
        identity: Identity | None,
        *,
        transport: httpx.BaseTransport | None = None,
        now: Callable[[], float] = time.time,
        reply_seconds: float = REPLY_SECONDS,
        reply_bytes: int = REPLY_BYTES,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.on_loopback = check_address(self.base_url)
        self.clock_offset: float | None = None
        self._now, self._reply_seconds, self._reply_bytes = now, reply_seconds, reply_bytes
        self._time_limit = TimeLimit()
        if identity is not None:
            self.hotkey, self._identity = identity.hotkey, identity
            signature = identity.sign(identity.hotkey)
            register_secret(signature)
            self._credentials = {HOTKEY_HEADER: identity.hotkey, SIGNATURE_HEADER: signature}
        self._http = httpx.Client(
            base_url=self.base_url,
            transport=transport,
            timeout=httpx.Timeout(reply_seconds, connect=min(CONNECT_SECONDS, reply_seconds)),
            follow_redirects=False,
            headers={"Accept": "application/json", "Accept-Encoding": ENCODING},
            **client_options(self.base_url),
        )

    def close(self) -> None:
        self._http.close()

    def exchange(
        self,
        method: str,
        route: str,
        reply: type[Reply],
        *,
        query: Query | None = None,
        body: BaseModel | None = None,
        signed: bool = False,
        bound: bool = False,
        each: Each | None = None,
        reply_bytes: int | None = None,
    ) -> Reply:
        """Send one request and return its validated reply.

        Raises Retry or Held of a type in `outcomes`, or a ValueError if `body` has NaN or an
        infinity.

        Args:
            signed: whether to send the headers with the hotkey and its constant signature.
            bound: whether to sign this whole request, as the API requires of validators.
            each: replaces each object of the reply, see `parse_reply`.
            reply_bytes: limit on this reply's body; None for that of the connection.
        """
        headers = dict(self._credentials) if signed else {}
        content = b""
        if body is not None:
            values = body.model_dump(mode="json", exclude_none=True)
            content = json.dumps(values, allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        if bound:
            target = httpx.URL(route, params=query).raw_path.decode()
            headers |= signed_headers(self._identity, method, target, content, self.server_time())
        stream = self._http.stream(
            method,
            route,
            params=query,
            content=content or None,
            headers=headers,
            extensions={"trace": self._time_limit},
        )
        longest = CONNECT_SECONDS + 2 * self._reply_seconds
        try:
            with self._time_limit.within(longest), stream as response:
                most = reply_bytes or self._reply_bytes if response.is_success else REPLY_BYTES
                self._note_clock(response.headers.get("Date"))
                data = self._body(route, response, most)
        except httpx.HTTPError as error:
            raise_transport(self.base_url, route, error)
        if not response.is_success:
            raise fault_of(route, response.status_code, response.headers, data, self.server_time())
        return parse_reply(route, data, reply, each)

    def status_of(self, route: str) -> int:
        """GET a route without credentials and return the reply's status; or raise Retry."""
        stream = self._http.stream("GET", route, extensions={"trace": self._time_limit})
        try:
            longest = CONNECT_SECONDS + self._reply_seconds
            with self._time_limit.within(longest), stream as response:
                return response.status_code
        except httpx.HTTPError as error:
            raise_transport(self.base_url, route, error)

    def _body(self, route: str, response: httpx.Response, most: int) -> bytes:
        """Return the body, read within one deadline; httpx's own limit restarts at every packet."""
        deadline = time.monotonic() + self._reply_seconds
        check_encoding(route, response.headers)
        data = bytearray()
        for piece in response.iter_bytes():
            data += piece
            check_size(route, len(data), most)
            if time.monotonic() > deadline:
                raise ReplyLost(f"{route} was still answering after {self._reply_seconds:g} s")
        return bytes(data)

    def server_time(self) -> float:
        """Return Unix seconds by the server's clock; before the first reply, by this machine's."""
        return self._now() + (self.clock_offset or 0.0)

    def _note_clock(self, date: str | None) -> None:
        server_time = http_date(date) if date else None
        if server_time is None:
            return
        first = self.clock_offset is None
        self.clock_offset = server_time - self._now()
        if first and abs(self.clock_offset) > CLOCK_SECONDS:
            log.warning(
                "this machine's clock and the server's differ; set it with NTP",
                server_ahead_seconds=round(self.clock_offset),
            )


def check_address(base_url: str) -> bool:
    """Return whether `base_url` is on this machine; raise ConfigError unless it is safe."""
    parts = urlsplit(base_url)
    on_loopback = parts.hostname in LOOPBACK
    if not parts.hostname or parts.username or parts.password:
        raise ConfigError(
            f"VALIDATOR_API_URL={redact(base_url)!r}: give an address like https://host."
        )
    if parts.scheme != "https" and not (parts.scheme == "http" and on_loopback):
        raise ConfigError(
            f"VALIDATOR_API_URL={redact(base_url)!r}: use https://, because every call carries a "
            "credential; http:// is for this machine only."
        )
    return on_loopback


def raise_transport(base_url: str, route: str, error: httpx.HTTPError) -> NoReturn:
    """Raise Untrusted, Unreachable (no request was sent) or ReplyLost for a failed exchange."""
    reason = f"{route}: {type(error).__name__}: {error}"
    untrusted = untrusted_certificate(error)
    if untrusted is not None:
        raise Untrusted(
            f"The certificate of {base_url} is not trusted ({untrusted.verify_message}); nothing "
            "was sent. If this continues, check VALIDATOR_API_URL and this machine's clock"
        ) from None
    never_sent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
    if isinstance(error, never_sent):
        raise Unreachable(reason) from None
    raise ReplyLost(reason) from None


def check_encoding(route: str, headers: Mapping[str, str]) -> None:
    """Raise ProtocolFault for an encoded body, before any of it is read."""
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", ENCODING):
        raise ProtocolFault(f"{route} answered with the encoding {encoding[:40]!r}")


def check_size(route: str, size: int, limit: int) -> None:
    """Raise TooLarge for a body of more than `limit` bytes."""
    if size > limit:
        raise TooLarge(f"{route} answered with more than {limit} bytes")


def parse_reply(route: str, data: bytes, reply: type[Reply], each: Each | None = None) -> Reply:
    """Return the validated message in `data`; raise ProtocolFault if it is not one.

    `each` replaces every JSON object as soon as it is parsed. It keeps only a number of another
    miner's row, so such rows take little memory and cannot make the reply invalid. NaN and Infinity
    are rejected without `each`, and accepted with it.
    """
    if sum(map(data.count, (b"[", b"{", b","))) > FREE_NODES + len(data) // BYTES_PER_NODE:
        raise TooLarge(f"{route} answered with too many JSON values")
    try:
        if each is None:
            content = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
        else:
            content = json.loads(data, object_hook=each)
        return reply.model_validate(content)
    except ValidationError as error:
        fields = ", ".join(
            f"{'.'.join(map(str, row['loc'])) or 'the reply'} ({row['type']})"
            for row in error.errors(include_input=False, include_url=False)[:3]
        )
        raise ProtocolFault(f"{route} answered with wrong fields: {fields}") from None
    except (ValueError, RecursionError):
        raise ProtocolFault(f"{route} answered with something that is not JSON") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # 1e999
        raise ValueError(f"{text} is out of range")
    return value
