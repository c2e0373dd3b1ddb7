"""Shared objects of all routes: settings, database, rate limit, clocks and the chain's hotkeys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy.engine import URL
from sqlalchemy.orm import Session

from neurons.runtime.identity import Neuron, subnet_neurons
from neurons.runtime.settings import Settings
from neurons.validator_api.auth import RateLimiter, ValidatorCall
from neurons.validator_api.competition import rounds
from neurons.validator_api.competition.rounds import Refusal, Transaction
from neurons.validator_api.database.storage import Storage
from neurons.wire.rules import block_at

Clock = Callable[[], float]
"""Returns Unix seconds."""


class Api:
    """The shared objects of one running API. Raises the errors of `Storage`.

    Args:
        clock: the time of rounds, blocks and bans.
        wall_clock: the time with which validators' signed timestamps are compared.
        neurons: returns the subnet's registered hotkeys; by default it reads the chain if a
            setting needs it.
        monotonic: the time of the rate limit.
        chain_seconds: pause between two reads of the chain.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock = time.time,
        wall_clock: Clock = time.time,
        monotonic: Clock = time.monotonic,
        neurons: Callable[[], Mapping[str, Neuron]] | None = None,
        chain_seconds: float = 600.0,
    ) -> None:
        needed = settings.uids_from_chain or settings.require_registration
        if neurons is None and (needed or settings.validator_stake is not None):
            neurons = partial(subnet_neurons, settings.netuid, settings.subtensor_network)
        self.settings, self.clock, self.wall_clock = settings, clock, wall_clock
        self.chain_seconds = chain_seconds
        url = settings.database_url
        file = URL.create("sqlite", database=str(settings.state_dir / "validator_api.db"))
        self.storage = Storage(file if url is None else url.get_secret_value())
        self.limiter = RateLimiter(settings.rate_limit, monotonic)
        self.read_chain = neurons
        self._neurons: Mapping[str, Neuron] | None = None  # until the chain's first reply

    def update_neurons(self) -> None:
        """Read the registered hotkeys; after ChainUnreachable, the earlier ones remain."""
        if self.read_chain is not None:
            self._neurons = self.read_chain()

    def check_on_chain(self, hotkey: str) -> None:
        """Raise a Refusal if REQUIRE_REGISTRATION is set and the chain does not list the hotkey."""
        if not self.settings.require_registration:
            return
        subnet = f"subnet {self.settings.netuid} of {self.settings.subtensor_network}"
        if self._neurons is None:
            raise Refusal(503, f"The registrations on {subnet} are not known yet")
        if hotkey not in self._neurons:
            raise Refusal(403, f"Hotkey not registered on {subnet}")

    def is_validator(self, hotkey: str) -> bool:
        if hotkey in self.settings.validator_hotkeys:
            return True
        least, neuron = self.settings.validator_stake, (self._neurons or {}).get(hotkey)
        return least is not None and neuron is not None and neuron.stake >= least

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Open a transaction that only reads; if the active round is overdue, end it first."""
        with self.storage.read() as session:
            t = self._transaction(session)
            if not rounds.is_overdue(t):
                yield t
                return
        with self.write() as t:
            yield t

    @contextmanager
    def write(self, call: ValidatorCall | None = None) -> Iterator[Transaction]:
        """Open a transaction that first ends an overdue round, and commit it at the end.

        A validator's `call` is refused if an earlier one had the same nonce.
        """
        with self.storage.write() as session:
            t = self._transaction(session)
            if call is not None:
                call.record_nonce(session)
            rounds.end_overdue(t)
            yield t

    def _transaction(self, session: Session) -> Transaction:
        uids = None
        if self.read_chain is not None:  # before the chain's first reply, no hotkey has a uid
            uids = {hotkey: neuron.uid for hotkey, neuron in (self._neurons or {}).items()}
        now = self.clock()
        block = block_at(now, self.settings.block_time_seconds)
        return Transaction(session, rounds.utc(now), block, self.settings, uids)


async def _api(request: Request) -> Api:  # FastAPI would run a plain function in a thread
    api: Api = request.app.state.api
    return api


TheApi = Annotated[Api, Depends(_api)]
