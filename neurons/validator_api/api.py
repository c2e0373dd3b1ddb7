"""What every route works with: the settings, the database, the limits and the present moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, TypeVar

from fastapi import Depends, HTTPException, Request
from sqlalchemy.orm import Session

from neurons.runtime.identity import Neuron
from neurons.validator_api.access.auth import ValidatorCall
from neurons.validator_api.access.limits import RateLimiter
from neurons.validator_api.competition import commits, rounds
from neurons.validator_api.competition.commits import Commit
from neurons.validator_api.competition.moment import Moment
from neurons.validator_api.config import ApiConfig
from neurons.validator_api.database.storage import Storage
from neurons.validator_api.database.together import Together
from neurons.wire.protocol import CommitReply

Result = TypeVar("Result")


class Api:
    """The parts of one running API.

    Raises:
        ConfigError: the database cannot be opened.
    """

    def __init__(self, config: ApiConfig) -> None:
        self.config = config
        self.storage = Storage(config.database_url)
        self.limiter = RateLimiter(config.rate_limit, config.clock)
        self.commits = Together(self._store_commits)
        self._neurons: Mapping[str, Neuron] = {}

    def moment(self) -> Moment:
        """Return the present."""
        uids = None
        if self.config.neurons is not None:  # until it answers nobody's uid is known
            uids = {hotkey: neuron.uid for hotkey, neuron in self._neurons.items()}
        return Moment(
            self.config.now(), self.config.block(), self.config.oldest_reveal_block(), uids
        )

    def ask_chain(self) -> None:
        """Learn who is registered on the subnet; what was known stays where no answer comes.

        Raises:
            ChainUnreachable: none came.
        """
        if self.config.neurons is not None:
            self._neurons = self.config.neurons()

    def is_validator(self, hotkey: str) -> bool:
        """Tell whether the hotkey may write verdicts."""
        if hotkey in self.config.validator_hotkeys:
            return True
        least, neuron = self.config.validator_stake, self._neurons.get(hotkey)
        return least is not None and neuron is not None and neuron.stake >= least

    def read(self, work: Callable[[Session, Moment], Result]) -> Result:
        """Return what `work` reads, after a round whose time is over has been ended."""
        moment = self.moment()
        with self.storage.read() as session:
            if not rounds.is_overdue(session, moment):
                return work(session, moment)
        self.end_overdue_round()
        with self.storage.read() as session:
            return work(session, self.moment())

    def write(
        self, work: Callable[[Session, Moment], Result], call: ValidatorCall | None = None
    ) -> Result:
        """Run `work` in one transaction, after a round whose time is over has been ended in it.

        Args:
            call: the validator's signed request, which counts once.
        """

        def in_turn(session: Session) -> Result:
            moment = self.moment()
            if call is not None:
                call.spend(session)
            rounds.end_overdue(session, moment)
            return work(session, moment)

        return self.storage.write(in_turn)

    def _store_commits(self, asked: Sequence[Commit]) -> Sequence[CommitReply | HTTPException]:
        return self.write(
            lambda session, moment: commits.store(session, asked, moment, self.config)
        )

    def end_overdue_round(self) -> None:
        """Finalize the active round when its time is over, and open the next."""
        moment = self.moment()
        with self.storage.read() as session:
            overdue = rounds.is_overdue(session, moment)
        if overdue:
            self.storage.write(lambda session: rounds.end_overdue(session, moment))


async def _api(request: Request) -> Api:  # FastAPI gives what is not async a thread each time
    api: Api = request.app.state.api
    return api


TheApi = Annotated[Api, Depends(_api)]
