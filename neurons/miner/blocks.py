"""The server's block number, also while a cache between server and miner returns an old one."""

from __future__ import annotations

import time

from neurons.wire.rules import BLOCK_SECONDS, block_at

STALE_SECONDS = 90.0
"""Seconds after which an unchanged block must come from a cache: a block takes 12 seconds."""

MAX_LAG = 86_400 // BLOCK_SECONDS
"""Blocks by which a cached number may lag behind the server's clock; other servers count from
another time or with other blocks, so their clock does not show their block."""


class BlockClock:
    """Follows the block numbers that one server shows.

    An estimate that is too high leads to a reply 425, which does no harm.
    """

    def __init__(self) -> None:
        self._shown: int | None = None
        self._since = 0.0  # monotonic time of the first reply with the number `_shown`

    def at(self, shown: int, server_time: float) -> int:
        """Return the present block by the one in a reply and the server's clock in Unix seconds."""
        moment = time.monotonic()
        if shown != self._shown:
            self._shown, self._since = shown, moment
        unchanged = moment - self._since
        if unchanged < STALE_SECONDS:
            return shown
        by_clock = block_at(server_time)
        estimate = shown + int(unchanged / BLOCK_SECONDS)
        return max(estimate, by_clock) if 0 <= by_clock - shown <= MAX_LAG else estimate
