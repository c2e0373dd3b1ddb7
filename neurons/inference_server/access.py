"""Whose request it is: a validator's, which has a reserved place in the queue, or a client's."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Collection, Mapping

from neurons.runtime.identity import verify
from neurons.wire.protocol import (
    HOTKEY_HEADER,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    request_text,
)

SKEW_SECONDS = 60
CLIENT_PREFIX = 64
"""Bits of an IPv6 address that stand for one client."""


def client_of(address: str) -> str:
    """Return what an address counts under: an IPv6 client has a whole network."""
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
        self._used: dict[str, float] = {}

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> bool:
        """Return whether a POST is a validator's, made within a minute and not seen before."""
        hotkey, nonce = headers.get(HOTKEY_HEADER, ""), headers.get(NONCE_HEADER, "")
        stamp, now = headers.get(TIMESTAMP_HEADER, ""), time.time()
        if hotkey not in self._hotkeys or not re.fullmatch(r"[0-9]{1,12}", stamp):
            return False
        if abs(int(stamp) - now) > SKEW_SECONDS or not re.fullmatch(r"[0-9a-f]{32,64}", nonce):
            return False
        text = request_text("POST", path, stamp, nonce, body)
        if not verify(hotkey, text, headers.get(SIGNATURE_HEADER, "")):
            return False
        self._used = {one: end for one, end in self._used.items() if end > now}
        if nonce in self._used:
            return False
        self._used[nonce] = int(stamp) + SKEW_SECONDS + 1
        return True
