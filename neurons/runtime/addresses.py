"""Checks the hosts of URLs, parses clients' addresses, and compares URLs."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

import idna

CLIENT_PREFIX = 64
"""Bits of an IPv6 address that identify a client: providers assign networks of this size."""

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def require_host(url: str) -> str:
    """Return the URL's host; raise a ValueError if no client can look it up."""
    parts = urlsplit(url)
    _ = parts.port  # raises a ValueError for a bad port
    bracketed = "[" in parts.netloc
    if not parts.hostname or (bracketed and not re.fullmatch(r"(.*@)?\[.*](:\d*)?", parts.netloc)):
        raise ValueError("names no host")
    if bracketed:
        ipaddress.IPv6Address(parts.hostname)
    else:
        require_name(parts.hostname)
    return parts.hostname


def require_name(host: str) -> None:
    """Raise a ValueError if `host` is neither an IPv4 address nor a name that DNS can hold."""
    if re.fullmatch(r"\d+(\.\d+){3}", host):
        ipaddress.IPv4Address(host)
        return
    try:
        name = host if host.isascii() else idna.encode(host.lower()).decode()
        if "xn--" in name:
            idna.decode(name)
    except UnicodeError:
        name = ""
    labels = name.removesuffix(".").split(".")
    if len(name) > 253 or not all(re.fullmatch(r"[\w-]{1,63}", one, re.ASCII) for one in labels):
        raise ValueError("the host's name is not valid")


def parse_ip(text: str) -> Ip | None:
    """Return the address in a text such as `1.2.3.4:80` or `[::1]`; None if there is none.

    An IPv4 address that is mapped into IPv6 is returned as IPv4.
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


def client_of(ip: Ip) -> str:
    """Return the key under which a client is counted: its IPv6 /64 network or IPv4 address."""
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((ip, CLIENT_PREFIX), strict=False))
    return str(ip)


def is_same_url(one: str, other: str) -> bool:
    """Return whether two URLs differ at most in the host's letter case or a final slash."""
    first, second = (
        parts._replace(netloc=parts.netloc.lower(), path=parts.path.rstrip("/"))
        for parts in map(urlsplit, (one, other))
    )
    return first == second
