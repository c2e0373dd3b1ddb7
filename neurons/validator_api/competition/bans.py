"""Bans: five failures of a client ban it for a day; each success removes one.

A ban withdraws the client's rows from the validators' queue. A client is an IPv4 address, an IPv6
network or, where several miners may share an address, a hotkey (`ban_key`).
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import select

from neurons.runtime.addresses import client_of, parse_ip
from neurons.runtime.observe import get_logger
from neurons.validator_api.competition.rounds import Refusal, Transaction
from neurons.validator_api.database.tables import IN_QUEUE, IpBan, Submission
from neurons.wire.rules import BAN_HOURS, FAILURES_BEFORE_BAN

log = get_logger("validator_api")


def ban_key(address: str | None, hotkey: str | None = None) -> str | None:
    """Return the key of a client, under which its failures count.

    Several clients may share an address that is unknown or on loopback. The key is then the
    hotkey's, or None without a hotkey.
    """
    ip = parse_ip((address or "").partition("/")[0])  # validators send the key of an IPv6 network
    if ip is None or ip.is_loopback:
        return f"hotkey {hotkey}" if hotkey else None
    return client_of(ip)


def key_of(client: str) -> str | None:
    """Return the key of a client as validators write it: an address, a network or `hotkey 5...`."""
    return client if client.startswith("hotkey ") else ban_key(client)


def check_not_banned(t: Transaction, client: str) -> None:
    """Raise a Refusal if the client is banned now."""
    row = t.session.get(IpBan, client)
    if row is not None and row.banned_until is not None and row.banned_until > t.now:
        hours = (row.banned_until - t.now).total_seconds() / 3600
        raise Refusal(403, f"IP address banned: IP banned for {hours:.1f} more hours")


def record_failure(t: Transaction, key: str) -> None:
    """Count a failure of the client; the fifth one bans it and withdraws its queued rows."""
    row = t.session.get(IpBan, key)
    if row is None:
        row = IpBan(ip_address=key, failure_count=0)
        t.session.add(row)
    if row.banned_until is not None and row.banned_until <= t.now:
        row.failure_count, row.banned_until = 0, None  # the ban is over, so counting starts again
    row.failure_count += 1
    if row.failure_count >= FAILURES_BEFORE_BAN:
        row.banned_until = t.now + timedelta(hours=BAN_HOURS)
        own = select(Submission).where(*IN_QUEUE, Submission.ip_address == key)
        queued = t.session.scalars(own).all()
        for one in queued:
            one.withdrawn_at = t.now
        failures, dropped = row.failure_count, len(queued)
        log.warning("banned", client=key, failures=failures, hours=BAN_HOURS, dropped=dropped)


def lift(t: Transaction, key: str) -> None:
    """Delete a client's failures and its ban; raise a Refusal if it has none.

    Rows that the ban withdrew stay withdrawn; their miners may submit them again.
    """
    row = t.session.get(IpBan, key)
    if row is None:
        raise Refusal(404, f"No ban and no failures of {key}")
    t.session.delete(row)
    log.warning("ban lifted", client=key)


def record_success(t: Transaction, key: str) -> None:
    """Remove one failure, unless the client has a ban."""
    row = t.session.get(IpBan, key)
    if row is not None and row.banned_until is None:
        row.failure_count = max(0, row.failure_count - 1)
