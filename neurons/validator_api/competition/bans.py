"""Bans: five failures of a client without a success between them ban it for a day.

A ban withdraws the client's rows from the validators' queue. A client is an address or, where
several share it, a hotkey (`ban_key`).
"""

from __future__ import annotations

import ipaddress
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from neurons.runtime.observe import get_logger
from neurons.validator_api.competition.errors import Banned
from neurons.validator_api.database.tables import IN_QUEUE, IpBan, Submission
from neurons.wire.rules import BAN_HOURS, FAILURES_BEFORE_BAN

CLIENT_PREFIX = 64
"""Bits of an IPv6 address that identify a client: a provider assigns it all their addresses."""

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

log = get_logger("validator_api")


def parse_ip(text: str) -> Ip | None:
    """Return the address in `1.2.3.4`, `1.2.3.4:80`, `::1` or `[::1]:80`; None for anything else.

    An IPv4 address that is written as an IPv6 address is the IPv4 address.
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
    """Return the key for counting an address's failures; None if several clients share it.

    This machine's addresses, and an unknown one, are shared: there the hotkey counts.
    """
    ip = parse_ip(address or "")
    if ip is None or ip.is_loopback:
        return f"hotkey {hotkey}" if hotkey else None
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((ip, CLIENT_PREFIX), strict=False))
    return str(ip)


def check_not_banned(session: Session, client: str, now: datetime) -> None:
    """Refuse a banned client."""
    row = session.get(IpBan, client)
    if row is not None and row.banned_until is not None and row.banned_until > now:
        hours = (row.banned_until - now).total_seconds() / 3600
        raise Banned(f"IP address banned: IP banned for {hours:.1f} more hours")


def record_failure(session: Session, key: str, now: datetime) -> None:
    """Count a failure of the client; the fifth one bans it."""
    row = session.get(IpBan, key)
    if row is None:
        row = IpBan(ip_address=key, failure_count=0)
        session.add(row)
    if row.banned_until is not None and row.banned_until <= now:
        row.failure_count, row.banned_until = 0, None  # served: it starts again from nothing
    row.failure_count += 1
    if row.failure_count >= FAILURES_BEFORE_BAN:
        row.banned_until = now + timedelta(hours=BAN_HOURS)
        dropped = _drop_queued(session, key, now)
        failures = row.failure_count
        log.warning("banned", client=key, failures=failures, hours=BAN_HOURS, dropped=dropped)


def _drop_queued(session: Session, key: str, now: datetime) -> int:
    """Take the client's rows out of the queue; return how many there were."""
    rows = session.scalars(select(Submission).where(*IN_QUEUE, Submission.ip_address == key)).all()
    for row in rows:
        row.withdrawn_at = now
    return len(rows)


def record_success(session: Session, key: str) -> None:
    """Forget the failures counted so far; a present ban lasts to its end."""
    row = session.get(IpBan, key)
    if row is not None and row.banned_until is None:
        row.failure_count = 0
