"""What holds at one moment: the server's time and block, and the chain's uids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Moment:
    """What a request sees as the present.

    Attributes:
        now: naive UTC.
        block: the server's block number.
        oldest_block: the reveal block of the oldest commitment that may still be revealed.
        uids: the chain's uid of each hotkey of the subnet; None where no chain tells.
    """

    now: datetime
    block: int
    oldest_block: int
    uids: Mapping[str, int] | None = None
