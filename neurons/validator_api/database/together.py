"""Serves what many ask for at once in one go, so that they share what a transaction costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")

MOST = 64
"""Questions in one go: it bounds how long the first of them waits."""


class Together(Generic[Question, Answer]):
    """Gathers questions while those before them are served; alone, a question waits for nobody.

    Args:
        serve: returns what each of several questions is answered, an exception to be raised among
            it. It runs in a thread, one call at a time, and what it raises is everybody's answer.
    """

    def __init__(self, serve: Callable[[Sequence[Question]], Sequence[Answer | Exception]]) -> None:
        self._serve = serve
        self._waiting: list[tuple[Question, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, question: Question) -> Answer:
        """Return the answer once it is final; raise what it is where it is an exception."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._serve_all())
        return await answer

    async def _serve_all(self) -> None:
        try:
            while self._waiting:
                taken, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                await self._serve_some(taken)
        finally:
            self._task = None

    async def _serve_some(self, taken: list[tuple[Question, asyncio.Future[Answer]]]) -> None:
        found: Sequence[Answer | Exception]
        try:
            found = await asyncio.to_thread(self._serve, [question for question, _ in taken])
        except Exception as error:
            found = [error] * len(taken)
        for (_, answer), one in zip(taken, found, strict=True):
            if answer.done():  # its client does not wait any more
                continue
            if isinstance(one, Exception):
                answer.set_exception(one)
            else:
                answer.set_result(one)
