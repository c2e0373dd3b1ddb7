"""What surrounds every request: the client's address, a limit on the body, one line in the log."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neurons.runtime.observe import get_logger

MOST_BODY_BYTES = 16 * 1024
FORWARDING = (b"x-forwarded-for", b"forwarded", b"x-real-ip")
CLIENT_PREFIX = 64
"""Bits of an IPv6 address that stand for one client: a provider gives out all that share them."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

access_log = get_logger("validator_api.access")
log = get_logger("validator_api")


class ClientAddress:
    """Puts the client's own address into the scope, or none where only a proxy's is known.

    X-Forwarded-For counts where the peer is a trusted proxy. Where a peer of this machine or of a
    private network forwards without being one, the client is unknown: whatever the header says
    may be made up, and the peer's address is everybody's.

    Args:
        trusted: addresses and networks, or `*` for any peer.
    """

    def __init__(self, app: ASGIApp, trusted: Sequence[str]) -> None:
        self._app = app
        self._anyone = "*" in trusted
        self._trusted = [ipaddress.ip_network(one, strict=False) for one in trusted if one != "*"]
        self._warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with the address that was found."""
        if scope["type"] == "http" and scope.get("client"):
            address = self._client(scope)
            if address != scope["client"][0]:
                scope = {**scope, "client": (address, 0) if address else None}
        await self._app(scope, receive, send)

    def _client(self, scope: Scope) -> str | None:
        peer = str(scope["client"][0])
        named = [value for name, value in scope["headers"] if name in FORWARDING]
        if not named:
            return peer
        address = parse_ip(peer)
        if address is None or self._trusts(address):
            return self._forwarded(scope)
        if not address.is_private:
            return peer  # a client that says it is a proxy
        if not self._warned:
            self._warned = True
            log.warning(
                "requests come through a proxy that TRUSTED_PROXIES does not name; bans count "
                "hotkeys behind it",
                proxy=peer,
            )
        return None

    def _forwarded(self, scope: Scope) -> str | None:
        """Return the last address of X-Forwarded-For that no trusted proxy has."""
        lines = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        hops = [hop for line in lines for hop in line.decode("latin-1").split(",")]
        for hop in reversed(hops):
            address = parse_ip(hop)
            if address is None:
                return None
            if self._anyone or not self._trusts(address):
                return str(address)
        return None

    def _trusts(self, address: Ip) -> bool:
        return self._anyone or any(
            address in network for network in self._trusted if network.version == address.version
        )


class BodyLimit:
    """Refuses a body of more than `MOST_BODY_BYTES` with 413, with or without a Content-Length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting what is read of its body."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MOST_BODY_BYTES:
                raise HTTPException(413, f"Request body is larger than {MOST_BODY_BYTES} bytes")
            return message

        await self._app(scope, counted, send)


class AccessLog:
    """Logs method, path, status, duration and address; never headers, query or body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and log its outcome."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        start = time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            quiet = scope["method"] == "GET" and status < 400
            write = access_log.debug if quiet else access_log.info
            write(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                ms=round(1000 * (time.perf_counter() - start), 1),
                client=(scope.get("client") or ("",))[0],
            )


def parse_ip(text: str) -> Ip | None:
    """Return the address in `1.2.3.4`, `1.2.3.4:80`, `::1` or `[::1]:80`; None for anything else.

    An IPv4 address in IPv6's clothes is the IPv4 address.
    """
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def ban_key(address: str | None, hotkey: str | None = None) -> str | None:
    """Return what failures from an address are counted under; None where that is nobody's own.

    This machine's addresses, and an unknown one, are shared: there the hotkey counts.
    """
    ip = parse_ip(address or "")
    if ip is None or ip.is_loopback:
        return f"hotkey {hotkey}" if hotkey else None
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((ip, CLIENT_PREFIX), strict=False))
    return str(ip)
