"""Compares the logits of a miner's inference server with those of the validator's own."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from neurons.runtime.errors import Postponed
from neurons.runtime.identity import Identity
from neurons.wire.connection import ENCODING, TimeLimit, check_encoding, check_size
from neurons.wire.inference_protocol import InferenceReply, InferenceRequest, ModelInfo
from neurons.wire.outcomes import ProtocolFault
from neurons.wire.protocol import QueuedSubmission, Verification
from neurons.wire.signed_request import signed_headers

PROMPT_TOKENS, NEW_TOKENS, LAST_STEP = 128, 512, 50
"""Numbers of prompt tokens and of new tokens, as in the public validator. The logits of one step
are compared; this step is drawn from 1 to LAST_STEP."""

TRIES = 3
BUSY = (429, 503)
"""Statuses of a server that may answer later."""
REPLY_SECONDS = 180.0
"""Seconds from the request to the last byte of its reply."""
REPLY_BYTES = 2**23
PAUSE_SECONDS = 2.0

_Model = TypeVar("_Model", bound=BaseModel)


class _NoAnswer(Exception):
    """A server gave no reply that can be compared; the message gives the cause."""


class _Busy(_NoAnswer):
    """The server is busy or the network is slow, so a later request may succeed."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of a logit verification."""

    verification: Verification
    answered: bool  # whether both servers replied; without a reply nothing is refuted


@dataclass
class LogitVerifier:
    """Sends the same secret prompt to two servers and compares their logits."""

    reference: str  # address of the validator's own server
    servers: Mapping[str, str]  # addresses by hotkey; miners without one are not verified
    min_cosine: float = 0.99
    max_difference: float = 0.1
    stop: threading.Event = field(default_factory=threading.Event)
    new_tokens: int = NEW_TOKENS
    signer: Identity | None = None  # signs the requests, so that servers give them priority

    def verify(self, submission: QueuedSubmission, *, final: bool = False) -> Comparison | None:
        """Return whether the miner's server runs the reference model; None without a server.

        Raises Postponed if the validator's own server gives no usable reply, or if the miner's is
        busy. With `final`, a busy miner's server counts as failed instead.
        """
        address = self.servers.get(submission.miner_hotkey)
        if address is None:
            return None
        try:
            request = self._request()
            expected = _ask(self.reference, request)
            if not expected.captured_logits:
                raise _NoAnswer("gave no logits.")
        except _NoAnswer as error:
            raise Postponed(f"The validator's own inference server {error}") from error
        try:
            reply = self._ask_miner(address, request, submission.miner_hotkey)
        except _NoAnswer as error:
            reason = f"The miner's inference server {error}"
            if isinstance(error, _Busy) and not final:
                raise Postponed(reason) from error
            return Comparison(_failed(submission, reason), answered=False)
        return Comparison(self._judge(submission, request, expected, reply), answered=True)

    def _request(self) -> InferenceRequest:
        """Return a request with a random prompt, so that no reply can be prepared in advance."""
        info = _read("GET", f"{self.reference}/model_info", None, ModelInfo)
        prompt = [secrets.randbelow(info.vocab_size) for _ in range(PROMPT_TOKENS)]
        step = 1 + secrets.randbelow(min(LAST_STEP, self.new_tokens))
        return InferenceRequest(prompt=prompt, gen_len=self.new_tokens, logits_at_step=step)

    def _ask_miner(self, address: str, request: InferenceRequest, hotkey: str) -> InferenceReply:
        began = time.monotonic()
        for number in range(1, TRIES + 1):
            try:
                return _ask(address, request, self.signer, hotkey)
            except _NoAnswer:
                late = time.monotonic() - began >= REPLY_SECONDS  # all evaluations wait meanwhile
                if number == TRIES or late or self.stop.wait(PAUSE_SECONDS):
                    raise
        raise AssertionError("unreachable")

    def _judge(
        self,
        submission: QueuedSubmission,
        request: InferenceRequest,
        expected: InferenceReply,
        reply: InferenceReply,
    ) -> Verification:
        reference, received = expected.captured_logits or [], reply.captured_logits or []
        if len(received) != len(reference):
            reason = (
                f"The miner's inference server gave {len(received)} logits, not {len(reference)}."
            )
            return _failed(submission, reason)
        if len(reply.tokens) != request.gen_len:
            counts = f"{len(reply.tokens)} tokens, not {request.gen_len}"
            return _failed(submission, f"The miner's inference server gave {counts}.")
        chosen = reply.tokens[(request.logits_at_step or 1) - 1]
        if not 0 <= chosen < len(received) or received[chosen] < max(received):
            reason = "The logits are not those from which the token was chosen."
            return _failed(submission, reason)
        cosine, difference = compare(reference, received)
        passed = cosine >= self.min_cosine and difference <= self.max_difference
        reason = (
            f"Cosine {cosine:.4f} (at least {self.min_cosine:g}), largest difference "
            f"{difference:.3g} (at most {self.max_difference:g})."
        )
        return Verification(
            submission_id=submission.id,
            verified=passed,
            cosine_similarity=cosine,
            max_abs_diff=min(difference, 1e9),
            throughput=len(reply.tokens) / max(1e-6, reply.elapsed_sec),  # NaN gives 1e-6
            reason=reason,
        )


def compare(reference: Sequence[float], received: Sequence[float]) -> tuple[float, float]:
    """Return the cosine and the largest difference of two lists of logits.

    They are -1 and 1e9 if a value is not finite, a sum exceeds the range of floats, or a list has
    only zeros.
    """
    difference = max(abs(a - b) for a, b in zip(reference, received, strict=True))
    try:
        product = math.fsum(a * b for a, b in zip(reference, received, strict=True))
        lengths = math.sqrt(
            math.fsum(a * a for a in reference) * math.fsum(b * b for b in received)
        )
    except (OverflowError, ValueError):  # a sum exceeds the range, or adds inf and -inf
        return -1.0, 1e9
    if not math.isfinite(product) or not lengths or not math.isfinite(lengths):
        return -1.0, 1e9
    return max(-1.0, min(1.0, product / lengths)), difference


def parse_servers(words: Sequence[str]) -> dict[str, str]:
    """Return addresses by hotkey from `hotkey=address` words, which the settings have validated."""
    pairs = (word.split("=", 1) for word in words)
    return {hotkey: address.rstrip("/") for hotkey, address in pairs}


def _failed(submission: QueuedSubmission, reason: str) -> Verification:
    return Verification(submission_id=submission.id, verified=False, reason=reason[:2000])


def _ask(
    address: str, request: InferenceRequest, signer: Identity | None = None, recipient: str = ""
) -> InferenceReply:
    """Return a server's reply; a `signer` signs the request for the miner `recipient`."""
    body, url = request.model_dump_json().encode(), f"{address}/inference"
    headers: dict[str, str] = {}
    if signer:
        path = urlsplit(url).path
        headers = signed_headers(signer, "POST", path, body, time.time(), recipient)
    return _read("POST", url, body, InferenceReply, headers)


def _read(
    method: str,
    url: str,
    body: bytes | None,
    kind: type[_Model],
    headers: Mapping[str, str] | None = None,
) -> _Model:
    """Return a checked reply of bounded length, within one deadline."""
    limit, data = TimeLimit(), bytearray()
    try:
        with (
            limit.within(REPLY_SECONDS),
            httpx.Client(timeout=REPLY_SECONDS, trust_env=False) as http,
            http.stream(
                *(method, url),
                content=body,
                headers={"Accept-Encoding": ENCODING, **(headers or {})},
                extensions={"trace": limit},
            ) as response,
        ):
            check_encoding("it", response.headers)
            for piece in response.iter_bytes():
                data += piece
                check_size("it", len(data), REPLY_BYTES)
    except httpx.TimeoutException:
        limit.over = True
    except httpx.HTTPError as error:
        if not limit.over:
            raise _NoAnswer(f"does not answer: {type(error).__name__}.") from error
    except ProtocolFault as fault:
        raise _NoAnswer(f"{fault.reason.removeprefix('it ')}.") from None
    if limit.over:
        raise _Busy(f"gave no complete reply within {REPLY_SECONDS:g} s.")
    if response.status_code in BUSY:
        raise _Busy(f"answered with status {response.status_code}.")
    if response.status_code != 200:
        raise _NoAnswer(f"answered with status {response.status_code}.")
    try:
        return kind.model_validate_json(bytes(data))
    except ValidationError as error:
        raise _NoAnswer("gave a reply that violates the protocol.") from error
