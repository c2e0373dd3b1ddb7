"""What the API needs to know, apart from where it listens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

from neurons.rules import BLOCK_SECONDS

Clock = Callable[[], float]
"""Returns the Unix time in seconds; a test puts its own in."""


@dataclass(frozen=True)
class ApiConfig:
    """The API's settings.

    Attributes:
        database_url: SQLAlchemy URL; `postgres://` and `postgresql://` use psycopg 3.
        blocks_until_reveal: blocks between a commit and the earliest reveal.
        block_time_seconds: seconds in a block.
        validator_hotkeys: ss58 addresses that may mark, verify, record failures and end rounds.
        rate_limit: submissions and commits a hotkey may send in a minute; 0 means no limit.
            Clients on the loopback interface are exempt: they are this machine's own.
        max_body_bytes: largest request body, in bytes.
        clock: Unix time in seconds.
    """

    database_url: str
    blocks_until_reveal: int = 100
    block_time_seconds: int = BLOCK_SECONDS
    validator_hotkeys: frozenset[str] = frozenset()
    rate_limit: int = 10
    limit_loopback: bool = False
    max_body_bytes: int = 64 * 1024
    clock: Clock = time.time

    def now(self) -> datetime:
        """Return the time as the wire and the database know it: naive UTC."""
        return utc(self.clock())


def utc(unix: float) -> datetime:
    """Return Unix seconds as naive UTC."""
    return datetime.fromtimestamp(unix, timezone.utc).replace(tzinfo=None)
