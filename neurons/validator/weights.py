"""Finalizes rounds that are over, and sets the chain's weights to the shares of the last round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import time

from neurons.runtime.identity import ChainUnreachable
from neurons.runtime.observe import get_logger
from neurons.validator.api import ValidatorApi
from neurons.wire.protocol import Weight, unix_time
from neurons.wire.rules import TOP_SHARES

AGAIN_SECONDS = 600.0
"""Pause before weights that the chain did not accept are sent again."""

log = get_logger("validator")


@dataclass
class WeightSetter:
    """Sets the chain's weights to the shares of the last finalized round.

    Unchanged weights are set again after `interval` seconds, so that they stay in force.
    """

    api: ValidatorApi
    # sets shares by hotkey and returns their uids; None: shares are only logged
    set_weights: Callable[[Mapping[str, float]], Mapping[str, int]] | None
    interval: float
    clock: Callable[[], float] = time
    _last: Mapping[str, float] | None = None
    _due: float = 0.0

    def run_once(self) -> None:
        """Finalize a round that is over, and set weights that changed or are due.

        Raises ApiFault if the API does not answer.
        """
        current = self.api.current_round()
        if current.status == "active" and 0.0 < unix_time(current.end_time) <= self.clock():
            self.api.finalize_round(current.id)
        shares = shares_of(self.api.weights())
        if not shares or (shares == self._last and self.clock() < self._due):
            return
        if self.set_weights is None:
            log.info("weights", shares=shares, chain="disabled")
        elif self.clock() < self._due and self._last is None:
            return  # the last attempt failed less than AGAIN_SECONDS ago
        else:
            try:
                uids = self.set_weights(shares)
            except ChainUnreachable as error:
                log.warning("weights not set", reason=str(error), seconds=AGAIN_SECONDS)
                self._last, self._due = None, self.clock() + AGAIN_SECONDS
                return
            unknown = sorted(set(shares) - set(uids))
            log.info("weights set", shares=shares, uids=dict(uids), not_registered=unknown)
        self._last, self._due = shares, self.clock() + self.interval


def shares_of(weights: list[Weight]) -> dict[str, float]:
    """Return the shares by hotkey, which depend only on the ranks."""
    shares: dict[str, float] = {}
    for row, share in zip(weights, TOP_SHARES, strict=False):
        shares[row.hotkey] = shares.get(row.hotkey, 0.0) + share
    return shares
