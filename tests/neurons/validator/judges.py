"""A validator whose evaluations are fakes, against a live API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neurons.validator.api import ValidatorApi
from neurons.validator.attempts import Attempts
from neurons.validator.loop import Validator
from neurons.validator.verdict import Verdict, judge
from neurons.wire.protocol import QueuedSubmission
from tests.neurons.live_api import VALIDATOR, LiveApi


class Judge:
    """A fake evaluation: its verdict, or the error that it raises, by submission."""

    def __init__(
        self, gpu: str = "", answers: Mapping[str, Any] | None = None, **further: Any
    ) -> None:
        self.gpu, self.answers = gpu, {**(answers or {}), **further}
        self.judged: list[int] = []
        self.shares: list[float] = []

    def evaluate(self, submission: QueuedSubmission, share: float = 1.0) -> Verdict:
        self.judged.append(submission.id)
        self.shares.append(share)
        answer = self.answers.get(f"s{submission.id}", judge(1.0, 1.0))
        if isinstance(answer, BaseException):
            raise answer
        return answer


@dataclass
class Bench:
    """A validator with fake evaluations, and a clock that tests move."""

    api: LiveApi
    judge: Judge
    file: Path
    now: float = 1_770_000_000.0
    further: tuple[Judge, ...] = ()

    def run_once(self) -> None:
        self.start().run_once()

    def start(self) -> Validator:
        """Return a newly started validator."""
        attempts = Attempts(self.file, self.api.url, lambda: self.now)
        client = ValidatorApi(self.api.url, VALIDATOR)
        judges: list[Any] = [self.judge, *self.further]
        return Validator(client, judges, attempts, threading.Event())


def scores(api: LiveApi) -> dict[int, float]:
    rows = api.get("/get_submission_stats")["top_performers"]
    return {row["id"]: row["score"] for row in rows}


Benches = Callable[..., Bench]
