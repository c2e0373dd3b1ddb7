"""The bounded queue of requests, and the thread that decodes them one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from neurons.runtime.observe import get_logger
from neurons.wire.inference_protocol import InferenceRequest

WAITING_EACH = 2
"""Maximum number of waiting requests of one client."""
REMEMBERED = 1000
"""Maximum number of clients for which the order of their last jobs is remembered."""
RESERVED = 4
"""Maximum number of waiting requests of validators, in addition to all others."""

log = get_logger("inference")


@dataclass(frozen=True)
class Generation:
    """Tokens, the logits of the captured step, and seconds."""

    tokens: list[int]
    captured: list[float] | None
    seconds: float
    first_token_seconds: float


class Decodes(Protocol):
    """The interface of `model.Decoder`, importable without torch."""

    @property
    def device(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def longest(self) -> int: ...

    def generate(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        capture_at: int | None = None,
        cancelled: Callable[[], bool] = ...,
    ) -> Generation:
        """Generate tokens as `model.Decoder.generate` does."""


@dataclass(eq=False)
class Job:
    """A queued or running request."""

    request: InferenceRequest
    client: str = ""
    reserved: bool = False  # a validator's request, which goes first
    answer: Future[Generation] = field(default_factory=Future)
    # set once the client has disconnected
    cancelled: threading.Event = field(default_factory=threading.Event)


class Full(Exception):
    """The queue is full."""


class Decoding:
    """The thread that loads the model and then answers jobs, those of different clients in turn.

    At most `most` jobs wait, `WAITING_EACH` of one client; validators' jobs do not count.

    Attributes:
        decoder: None while the model is loading.
        fault: the reason if the model could not be loaded.
    """

    def __init__(self, load: Callable[[], Decodes], most: int) -> None:
        self._load, self._most = load, most
        self._jobs: list[Job] = []
        self._served: dict[str, None] = {}  # clients, least recently served first
        self._changed = threading.Condition()
        self.decoder: Decodes | None = None
        self.fault = ""
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Start no more jobs, and cancel the running one."""
        self.done.set()

    def put(self, request: InferenceRequest, client: str = "", *, reserved: bool = False) -> Job:
        """Queue a request and return its job; raise Full at the limit of client or queue."""
        job = Job(request, client, reserved)
        with self._changed:
            self._jobs = [one for one in self._jobs if not one.cancelled.is_set()]
            alike = [one for one in self._jobs if one.reserved == reserved]
            own = sum(one.client == client for one in alike)
            if len(alike) >= (RESERVED if reserved else self._most):
                raise Full
            if not reserved and own >= WAITING_EACH:
                raise Full
            self._jobs.append(job)
            self._changed.notify()
        return job

    def _take(self) -> Job | None:
        """Return the next job; None if none arrives within 0.2 s.

        Validators' jobs go first, then those of the least recently served client.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._jobs), 0.2):
                return None
            turns = {client: turn for turn, client in enumerate(self._served, 1)}
            job = min(self._jobs, key=lambda one: (not one.reserved, turns.get(one.client, 0)))
            self._jobs.remove(job)
            self._served.pop(job.client, None)
            self._served[job.client] = None
            if len(self._served) > REMEMBERED:
                del self._served[next(iter(self._served))]
            return job

    def _run(self) -> None:
        try:
            self.decoder = self._load()
        except Exception as error:  # a model may fail to load in any way
            self.fault = f"{type(error).__name__}: {error}"
            if not isinstance(error, OSError):  # an OSError's message names the file
                log.exception("the model cannot be loaded")
            self.done.set()
            return
        log.info("the model is loaded", device=self.decoder.device)
        while not self.done.is_set():
            job = self._take()
            if job is not None and not job.cancelled.is_set():
                self._answer(self.decoder, job)

    def _answer(self, decoder: Decodes, job: Job) -> None:
        request, yields = job.request, False

        def cancelled() -> bool:
            nonlocal yields
            # A validator waits only minutes, so its job interrupts those of others.
            yields = not job.reserved and any(one.reserved for one in self._jobs)
            return yields or job.cancelled.is_set() or self.done.is_set()

        try:
            answer = decoder.generate(
                request.prompt, request.gen_len, request.logits_at_step, cancelled
            )
        except Exception as error:  # such as out of memory; it ends only this request
            if yields and isinstance(error, InterruptedError):
                with self._changed:
                    self._jobs.append(job)  # it begins again after the validator's
            elif not job.cancelled.is_set():
                job.answer.set_exception(error)
        else:
            job.answer.set_result(answer)
