"""The client's address of a request that may come through reverse proxies."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from neurons.runtime.addresses import Ip, parse_ip

FORWARDING = (b"x-forwarded-for", b"forwarded", b"x-real-ip")


class ClientAddress:
    """Replaces the peer's address in the scope by the client's, or by None if that is unknown.

    A trusted proxy (`*`: every peer) names the client in X-Forwarded-For. If another peer on this
    machine or in a private network forwards a request, the client is unknown: the header may be
    forged, and all clients share the peer's address. One warning then contains `effect`.
    """

    def __init__(self, app: ASGIApp, trusted: Sequence[str], log: Any, effect: str) -> None:
        self._app, self._log, self._effect = app, log, effect
        self._anyone = "*" in trusted
        self._trusted = [ipaddress.ip_network(one, strict=False) for one in trusted if one != "*"]
        self._warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            return peer  # a client, although it sends a proxy's headers
        if not self._warned:
            self._warned = True
            problem = "requests come through a proxy that TRUSTED_PROXIES does not name"
            self._log.warning(f"{problem}; {self._effect}", proxy=peer)
        return None

    def _forwarded(self, scope: Scope) -> str | None:
        """Return the last address in X-Forwarded-For that is not a trusted proxy's."""
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
