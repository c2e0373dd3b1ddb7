"""What the API needs to know, apart from where it listens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from neurons.runtime.identity import Neuron
from neurons.wire.rules import BLOCK_SECONDS, block_at

Clock = Callable[[], float]
"""Returns the Unix time in seconds; a test puts its own in."""


@dataclass(frozen=True)
class ApiConfig:
    """The API's settings.

    Attributes:
        database_url: SQLAlchemy URL; `postgres://` and `postgresql://` use psycopg 3.
        blocks_until_reveal: blocks between a commit and the earliest reveal.
        reveal_window_blocks: blocks from then on in which the reveal is taken.
        block_time_seconds: seconds in a block.
        validator_hotkeys: ss58 addresses that may mark, verify, record failures and end rounds.
        neurons: asks the chain who is registered on the subnet; None: no chain is asked, and uids
            are this server's own count.
        validator_stake: what makes a registered hotkey a validator beside those listed, in tokens.
        rate_limit: calls a hotkey may make in a minute of the four routes for miners, all
            together; 0 means no limit.
        allow_file_forks: whether forks may lie on this machine (file:// and http).
        trusted_proxies: addresses and networks whose X-Forwarded-For is believed.
        max_body_bytes: largest request body, in bytes.
        clock: Unix time in seconds, by which rounds, blocks and bans go.
        wall_clock: Unix time in seconds, against which validators' signed times are held.
        cache_seconds: how old an answer may be that all who ask get alike; 0 keeps none.
        round_check_seconds: the pause between two looks whether the round is over.
        chain_seconds: the pause between two questions to the chain.
    """

    database_url: str
    blocks_until_reveal: int = 100
    reveal_window_blocks: int = 300
    block_time_seconds: int = BLOCK_SECONDS
    validator_hotkeys: frozenset[str] = frozenset()
    neurons: Callable[[], Mapping[str, Neuron]] | None = None
    validator_stake: float | None = None
    rate_limit: int = 10
    allow_file_forks: bool = False
    trusted_proxies: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024
    clock: Clock = time.time
    wall_clock: Clock = time.time
    cache_seconds: float = 0.0
    round_check_seconds: float = 5.0
    chain_seconds: float = 600.0

    def now(self) -> datetime:
        """Return the time as the wire and the database know it: naive UTC."""
        return utc(self.clock())

    def block(self) -> int:
        """Return the block number of this moment."""
        return block_at(self.clock(), self.block_time_seconds)

    def oldest_reveal_block(self) -> int:
        """Return the reveal block of the oldest commitment that may still be revealed."""
        return self.block() - self.reveal_window_blocks


def utc(unix: float) -> datetime:
    """Return Unix seconds as naive UTC."""
    return datetime.fromtimestamp(unix, timezone.utc).replace(tzinfo=None)
