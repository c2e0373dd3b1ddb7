"""Bans: five failures of an address without a success between them shut it out for a day."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from neurons.observe import get_logger
from neurons.rules import BAN_HOURS, FAILURES_BEFORE_BAN
from neurons.validator_api.storage import IpBan

log = get_logger("validator_api")


def ban_left(session: Session, ip_address: str, now: datetime) -> timedelta | None:
    """Return how long the address is still banned, or None."""
    row = session.get(IpBan, ip_address)
    if row is None or row.banned_until is None or row.banned_until <= now:
        return None
    return row.banned_until - now


def record_failure(session: Session, ip_address: str, now: datetime) -> None:
    """Count a failure against the address; the fifth one bans it."""
    row = session.get(IpBan, ip_address)
    if row is None:
        row = IpBan(ip_address=ip_address, failure_count=0)
        session.add(row)
    if row.banned_until is not None and row.banned_until <= now:
        row.failure_count, row.banned_until = 0, None  # served: it starts again from nothing
    row.failure_count += 1
    if row.failure_count >= FAILURES_BEFORE_BAN:
        row.banned_until = now + timedelta(hours=BAN_HOURS)
        log.warning("address banned", ip=ip_address, failures=row.failure_count, hours=BAN_HOURS)


def record_success(session: Session, ip_address: str) -> None:
    """Forget the failures counted so far; a ban that stands is served to its end."""
    row = session.get(IpBan, ip_address)
    if row is not None and row.banned_until is None:
        row.failure_count = 0
