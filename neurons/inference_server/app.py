"""The routes of the inference server: limits, queueing, and cancellation after a disconnect."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import generate_latest as metrics_text
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from neurons.inference_server.queue import Decodes, Decoding, Full, Generation, Job
from neurons.runtime.addresses import client_of, parse_ip
from neurons.runtime.middleware import BodyLimit, ClientAddress
from neurons.runtime.observe import get_logger
from neurons.wire.inference_protocol import Health, InferenceReply, InferenceRequest, ModelInfo
from neurons.wire.protocol import HOTKEY_HEADER
from neurons.wire.signed_request import NotSigned, check_signed_request

LOADING_SECONDS, BUSY_SECONDS = 10, 2
"""Retry-After in seconds while the model loads, and while the queue is full."""
POLL_SECONDS = 0.1
GONE = "The client has gone"
OUTCOMES = {499: "cancelled", 500: "failed", 503: "busy"}
"""Outcomes in the metrics, by the status of an error; all other errors count as `refused`."""
log = get_logger("inference")

PROBLEMS = 3
"""Maximum number of problems with a request's body that an error lists."""
MAX_BODY_BYTES = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of a request, in tokens."""

    prompt: int
    new: int  # to generate


class ValidatorRequests:
    """Recognises requests that one of these hotkeys signed for this server's miner, each once.

    `unnamed` also accepts the previous version's signatures, which do not name a recipient, so that
    another miner can forward such a request to this server.
    """

    def __init__(
        self, hotkeys: Collection[str] = (), recipient: str | None = None, *, unnamed: bool = False
    ) -> None:
        self._hotkeys = frozenset(hotkeys)
        self._recipients = [*([recipient] if recipient else []), *([""] if unnamed else [])]
        self._used: dict[str, int] = {}
        self._lock = threading.Lock()  # requests are checked in several threads

    def accept(self, path: str, headers: Mapping[str, str], body: bytes) -> bool:
        """Return whether a validator has signed this POST in the last minute, with a new nonce."""
        if headers.get(HOTKEY_HEADER) not in self._hotkeys:
            return False
        now = time.time()
        try:
            request = check_signed_request("POST", path, headers, body, now, self._recipients)
        except NotSigned:
            return False
        with self._lock:
            self._used = {one: end for one, end in self._used.items() if end > now}
            if request.nonce in self._used:
                return False
            self._used[request.nonce] = request.expires_at
        return True


class Metrics:
    """The metrics that Prometheus reads at GET /metrics."""

    def __init__(self, decoding: Decoding) -> None:
        self.registry = CollectorRegistry()
        where: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("inference_requests", "Requests by outcome", ["outcome"], **where)
        self.tokens = Counter("inference_tokens", "Tokens that were generated", **where)
        self.first = Histogram("inference_first_token_seconds", "To the first token", **where)
        self.total = Histogram("inference_seconds", "From the request to its answer", **where)
        waiting = Gauge("inference_waiting", "Requests in the queue", **where)
        waiting.set_function(lambda: decoding.waiting)

    def note(self, answer: Generation, seconds: float) -> None:
        self.requests.labels("answered").inc()
        self.tokens.inc(len(answer.tokens))
        self.first.observe(answer.first_token_seconds)
        self.total.observe(seconds)


def create_app(
    decoding: Decoding,
    model_name: str,
    device: str,
    limits: Limits,
    signed: ValidatorRequests | None = None,
    trusted_proxies: Sequence[str] = (),
) -> FastAPI:
    """Return the application, which starts and stops `decoding`; `signed` requests go first."""
    validators = signed or ValidatorRequests()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        decoding.start()
        yield
        decoding.stop()

    app = FastAPI(title="QUASAR inference server", lifespan=lifespan)
    app.add_middleware(BodyLimit, most=MAX_BODY_BYTES)
    app.add_middleware(
        ClientAddress, trusted=trusted_proxies, log=log, effect="all clients behind it count as one"
    )
    metrics = Metrics(decoding)

    @app.get("/health")
    def health() -> Health:
        status = "failed" if decoding.fault else "healthy" if decoding.decoder else "loading"
        return Health(status=status, model_name=model_name, device=device)

    @app.get("/model_info")
    def model_info() -> ModelInfo:
        decoder = _ready(decoding)
        return ModelInfo(
            model_name=model_name,
            device=device,
            vocab_size=decoder.vocabulary,
            max_prompt_tokens=limits.prompt,
            max_new_tokens=limits.new,
        )

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(metrics_text(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/inference")
    async def inference(request: Request) -> InferenceReply:
        began = time.perf_counter()
        try:
            job = await _queued(request, decoding, limits, validators)
            answer = await _answer(request, job)
            if answer.captured and not all(map(math.isfinite, answer.captured)):
                raise HTTPException(500, "The model computes logits that are not finite")
        except HTTPException as error:
            metrics.requests.labels(OUTCOMES.get(error.status_code, "refused")).inc()
            raise
        metrics.note(answer, time.perf_counter() - began)
        return InferenceReply(
            tokens=answer.tokens, captured_logits=answer.captured, elapsed_sec=answer.seconds
        )

    return app


async def _queued(
    request: Request, decoding: Decoding, limits: Limits, signed: ValidatorRequests
) -> Job:
    """Check the request and put it into the queue; raise a 499 if the client disconnects."""
    decoder = _ready(decoding)
    try:
        data = await request.body()
    except ClientDisconnect:
        raise HTTPException(499, GONE) from None
    body = _checked(_parsed(data), decoder, limits)
    host = request.client.host if request.client else ""
    ip = parse_ip(host)
    client = client_of(ip) if ip else host
    path, headers = request.url.path, request.headers
    reserved = await asyncio.to_thread(signed.accept, path, headers, data)
    try:
        return decoding.put(body, client, reserved=reserved)
    except Full:
        raise _later("Too many requests wait", BUSY_SECONDS) from None


def _ready(decoding: Decoding) -> Decodes:
    if decoding.fault:
        raise HTTPException(503, "The model could not be loaded")
    if decoding.decoder is None:
        raise _later("The model is loading", LOADING_SECONDS)
    return decoding.decoder


def _later(reason: str, seconds: int) -> HTTPException:
    return HTTPException(503, reason, headers={"Retry-After": str(seconds)})


def _parsed(data: bytes) -> InferenceRequest:
    try:
        return InferenceRequest.model_validate_json(data)
    except ValidationError as error:
        problems = [
            (".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()[:PROBLEMS]
        ]
        detail = "; ".join(": ".join(filter(None, words)) for words in problems)
        raise HTTPException(422, detail) from None


def _checked(body: InferenceRequest, decoder: Decodes, limits: Limits) -> InferenceRequest:
    longest = min(limits.prompt + limits.new, decoder.longest)
    problems = {
        f"prompt has more than {limits.prompt} tokens": len(body.prompt) > limits.prompt,
        f"gen_len is more than {limits.new}": body.gen_len > limits.new,
        f"prompt and gen_len together are more than {longest} tokens": (
            len(body.prompt) + body.gen_len > longest
        ),
        "logits_at_step is more than gen_len": (body.logits_at_step or 1) > body.gen_len,
        f"prompt has a token that is not below {decoder.vocabulary}": (
            max(body.prompt) >= decoder.vocabulary
        ),
    }
    for problem, applies in problems.items():
        if applies:
            raise HTTPException(422, problem)
    return body


async def _answer(request: Request, job: Job) -> Generation:
    """Wait for the answer; cancel the job if the client disconnects."""
    answer = asyncio.wrap_future(job.answer)
    try:
        while not (await asyncio.wait({answer}, timeout=POLL_SECONDS))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, GONE)
        try:
            return answer.result()
        except Exception as error:
            raise HTTPException(500, f"The model failed: {type(error).__name__}") from error
    finally:
        job.cancelled.set()
