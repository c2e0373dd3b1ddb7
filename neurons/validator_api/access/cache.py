"""Keeps the answers that everybody gets alike for a moment, so that a crowd costs one of them."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SAME_FOR_ALL = re.compile(
    r"/|/rounds(/[0-9]+)?|/submissions/[0-9]+|/verification_stats"
    r"|/get_(submission_stats|submission_rate|weights|current_round)"
)
"""Paths of which an answer may be a moment old. What a miner asks of its own commitments is not
among them: it must see what it has just written."""
MOST = 256
"""Answers that are kept at once."""


@dataclass
class _Answer:
    """What a route has sent, once `done`; for others where that was a 200, which is `good`."""

    at: float
    messages: list[Message] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    good: bool = False


class AnswerCache:
    """Sends one answer to all who ask for the same within `seconds`; 0 keeps nothing."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds
        self._answers: dict[tuple[str, bytes], _Answer] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer from what is kept, or pass the request on and keep the answer."""
        if (
            not self._seconds
            or scope["type"] != "http"
            or scope["method"] != "GET"
            or not SAME_FOR_ALL.fullmatch(scope["path"])
        ):
            await self._app(scope, receive, send)
            return
        key, now = (scope["path"], scope["query_string"]), time.monotonic()
        known = self._answers.get(key)
        if known is not None and now - known.at < self._seconds:
            await known.done.wait()
            if known.good:
                for message in known.messages:
                    await send(message)
                return
        for message in await self._ask(key, _Answer(now), scope, receive):
            await send(message)

    async def _ask(
        self, key: tuple[str, bytes], answer: _Answer, scope: Scope, receive: Receive
    ) -> list[Message]:
        """Return what the route sends; the others have it before the first who asked takes any."""
        self._keep(key, answer)

        async def note(message: Message) -> None:
            answer.messages.append(message)

        try:
            await self._app(scope, receive, note)
            answer.good = answer.messages[0]["status"] == 200
        finally:
            if not answer.good and self._answers.get(key) is answer:
                del self._answers[key]
            answer.done.set()
        return answer.messages

    def _keep(self, key: tuple[str, bytes], answer: _Answer) -> None:
        self._answers.pop(key, None)
        while len(self._answers) >= MOST:  # the first is the oldest
            del self._answers[next(iter(self._answers))]
        self._answers[key] = answer
