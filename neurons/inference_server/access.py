"""Separates validators' requests, which have a reserved place in the queue, from clients'."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Collection, Mapping

from neurons.wire.protocol import HOTKEY_HEADER
from neurons.wire.signed_request import NotSigned, check_signed_request

CLIENT_PREFIX = 64
"""Bits of an IPv6 address that identify a client."""


def client_of(address: str) -> str:
    """Return the key for counting an address: an IPv6 client has a whole network."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is None:
        return str(ipaddress.ip_network((ip, CLIENT_PREFIX), strict=False))
    return str(getattr(ip, "ipv4_mapped", None) or ip)


class ValidatorRequests:
    """Knows requests that a validator has signed as a whole; each counts once.

    Args:
        hotkeys: the validators' ss58 addresses.
    """

    def __init__(self, hotkeys: Collection[str]) -> None:
        self._hotkeys = frozenset(hotkeys)
        self._used: dict[str, int] = {}

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> bool:
        """Return whether a POST is a validator's, made within a minute and not seen before."""
        if headers.get(HOTKEY_HEADER) not in self._hotkeys:
            return False
        now = time.time()
        try:
            request = check_signed_request("POST", path, headers, body, now)
        except NotSigned:
            return False
        self._used = {one: end for one, end in self._used.items() if end > now}
        if request.nonce in self._used:
            return False
        self._used[request.nonce] = request.expires_at
        return True
