"""A miner that kills itself with SIGKILL at a named moment."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from neurons.miner.context import Context
from neurons.miner.daemon import run_cycle
from neurons.miner.journal import Journal
from neurons.runtime.network import certificates
from neurons.wire.client import ApiClient
from tests.neurons.miner.parts import FakeFork, Key, Waits, make_context

OnMoment = Callable[[str, str], None]
"""Called with `before` or `after`, and the state, the path or `push`."""


def watched_miner(state_dir: Path, url: str, on_moment: OnMoment, **options: Any) -> Context:
    """Return a miner that calls `on_moment`; `options` are those of `make_context`."""

    class Transport(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            on_moment("before", request.url.path)
            response = super().handle_request(request)
            on_moment("after", request.url.path)
            return response

    class Watched(Journal):
        def transition(self, before: Any, after: Any, **names: Any) -> Any:
            on_moment("before", after.state.value)
            result = super().transition(before, after, **names)
            on_moment("after", after.state.value)
            return result

    class Fork(FakeFork):
        def push(self, commit: str) -> None:
            on_moment("before", "push")
            super().push(commit)
            on_moment("after", "push")

    return make_context(
        state_dir,
        url,
        fork=Fork(state_dir / "fork"),
        client=ApiClient(url, Key(), transport=Transport(verify=certificates())),
        journal=Watched(state_dir / "journal.sqlite"),
        **options,
    )


def main(state_dir: Path, url: str, mode: str, moment: str) -> None:
    """Run one cycle.

    Args:
        moment: `before` or `after`, a colon, and the journal's new state, the path of a request or
            `push`; or `never`.
    """

    def die(when: str, what: str) -> None:
        if f"{when}:{what}" == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    context = watched_miner(state_dir, url, die, submission_mode=mode, waiter=Waits())
    run_cycle(context)
