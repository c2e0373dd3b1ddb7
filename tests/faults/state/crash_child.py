"""One life of the miner that kills itself with SIGKILL at a named moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from neurons.miner.context import Context
from neurons.miner.daemon import run_cycle
from neurons.miner.journal import Journal
from neurons.wire.client import ApiClient
from tests.neurons.miner.parts import FakeFork, Key, Waits, make_context

PassBy = Callable[[str, str], None]
"""Told `before` or `after`, and the state, path or `push` that a life comes to."""


def life(state_dir: Path, url: str, pass_by: PassBy, **given: Any) -> Context:
    """Return a miner that tells `pass_by` each moment; `given` is as `make_context` takes it."""

    class Transport(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            pass_by("before", request.url.path)
            response = super().handle_request(request)
            pass_by("after", request.url.path)
            return response

    class Watched(Journal):
        def transition(self, before: Any, after: Any, **names: Any) -> Any:
            pass_by("before", after.state.value)
            result = super().transition(before, after, **names)
            pass_by("after", after.state.value)
            return result

    class Fork(FakeFork):
        def push(self, commit: str) -> None:
            pass_by("before", "push")
            super().push(commit)
            pass_by("after", "push")

    return make_context(
        state_dir,
        url,
        fork=Fork(state_dir / "fork"),
        client=ApiClient(url, Key(), transport=Transport()),
        journal=Watched(state_dir / "journal.sqlite"),
        **given,
    )


def main(state_dir: Path, url: str, mode: str, moment: str) -> None:
    """Run one cycle.

    Args:
        moment: `before` or `after`, a colon, and a state that the journal goes to, a path that is
            called or `push`; or `never`.
    """

    def die(when: str, what: str) -> None:
        if f"{when}:{what}" == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    context = life(state_dir, url, die, submission_mode=mode, waiter=Waits())
    run_cycle(context)
