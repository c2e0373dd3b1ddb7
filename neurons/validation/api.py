"""The validator's side of the API: the queue, and the verdicts that it writes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx
import stamina
from pydantic import ValidationError

from neurons.errors import ConfigError, QuasarError
from neurons.mining.client import Signer
from neurons.observe import get_logger, redact, register_secret
from neurons.protocol import (
    HOTKEY_HEADER,
    SIGNATURE_HEADER,
    FailureRequest,
    MarkValidatedRequest,
    QueuedSubmission,
)

QUEUE_ROWS = 100
REPLY_BYTES = 2**22
REPLY_SECONDS = 8.0
ATTEMPTS = 3
PAUSE_SECONDS = 2.0
PASSING_STATUSES = (429, 500, 502, 503, 504)

log = get_logger("validator")


class ApiFault(QuasarError):
    """The API did not answer, or not as the protocol says; the next poll tries again."""


class ValidatorApi:
    """Calls of one validator API with a validator's headers.

    Args:
        base_url: https, or http on this machine.
        identity: the validator's hotkey, which VALIDATOR_HOTKEYS of the API must list.
        stop: when set, nothing is tried again.

    Raises:
        ConfigError: the address would show the signature header to others.
    """

    def __init__(
        self,
        base_url: str,
        identity: Signer,
        *,
        stop: threading.Event | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        self.on_loopback = _is_loopback(parts.hostname or "")
        if parts.scheme != "https" and not self.on_loopback:
            raise ConfigError(
                f"VALIDATOR_API_URL={redact(base_url)}: the signature header is a credential. "
                "Give an https address."
            )
        signature = identity.sign(identity.hotkey)
        register_secret(signature)
        self._hotkey = identity.hotkey
        self._stop = stop or threading.Event()
        self._http = httpx.Client(
            base_url=base_url,
            headers={HOTKEY_HEADER: identity.hotkey, SIGNATURE_HEADER: signature},
            timeout=REPLY_SECONDS,
            transport=transport,
            follow_redirects=False,  # the headers are for this host only
            trust_env=not self.on_loopback,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def queue(self) -> list[QueuedSubmission]:
        """Return the revealed submissions that nobody has judged, the oldest first.

        A row that is not as the protocol says is left out, so that it cannot block the others.
        """
        reply = self._call("GET", "/get_submission_stats", params={"limit": QUEUE_ROWS})
        rows = reply.get("recent_submissions")
        if not isinstance(rows, list):
            raise ApiFault("GET /get_submission_stats: no list of submissions.")
        queued = []
        for row in rows:
            try:
                queued.append(QueuedSubmission.model_validate(row))
            except ValidationError as error:
                log.warning("malformed row in the queue", problem=str(error.errors()[0]["msg"]))
        return sorted(filter(_may_be_judged, queued), key=lambda row: (row.created_at, row.id))

    def mark(self, submission_id: int, score: float) -> None:
        """Write the score."""
        body = MarkValidatedRequest(submission_id=submission_id, score=score)
        self._call("POST", "/mark_validated", json=body.model_dump())

    def record_failure(self, address: str) -> None:
        """Count a failed submission against the address it was sent from."""
        self._call("POST", "/record_failure", json=FailureRequest(ip_address=address).model_dump())

    def _call(self, method: str, path: str, **options: Any) -> Mapping[str, Any]:
        try:
            for attempt in stamina.retry_context(
                on=self._passes, attempts=ATTEMPTS, wait_initial=0.2, wait_max=PAUSE_SECONDS
            ):
                with attempt:
                    response = self._send(method, path, **options)
                    if response.status_code in PASSING_STATUSES:
                        response.raise_for_status()
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise ApiFault(f"{method} {path}: {type(error).__name__}: {error}") from error
        if response.status_code in (401, 403):
            raise ConfigError(
                f"{method} {path} was refused with {response.status_code} ({_detail(response)}). "
                f"Add the validator's hotkey {self._hotkey} to the API's VALIDATOR_HOTKEYS."
            )
        if response.status_code != 200:
            raise ApiFault(f"{method} {path}: {response.status_code} {_detail(response)}")
        return _object(response.content, f"{method} {path}")

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send and read at most `REPLY_BYTES` in at most `REPLY_SECONDS` after the first byte."""
        deadline = time.monotonic() + REPLY_SECONDS
        with self._http.stream(method, path, **options) as response:
            body = bytearray()
            for part in response.iter_bytes():
                body += part
                if len(body) > REPLY_BYTES:
                    raise ApiFault(f"{method} {path}: the reply is larger than {REPLY_BYTES} B.")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the reply came too slowly", request=response.request)
            return httpx.Response(
                response.status_code, content=bytes(body), request=response.request
            )

    def _passes(self, error: Exception) -> bool:
        return not self._stop.is_set() and isinstance(
            error, (httpx.TransportError, httpx.HTTPStatusError)
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _may_be_judged(row: QueuedSubmission) -> bool:
    """Tell a revealed submission from a commitment, which the public server lists as well."""
    return bool(row.is_revealed and not row.validated and row.fork_url and row.commit_hash)


def _detail(response: httpx.Response) -> str:
    text = response.text
    with suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["detail"])
    return redact(" ".join(text.split()))[:200]


def _object(content: bytes, call: str) -> Mapping[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ApiFault(f"{call}: the reply is not JSON.") from error
    if not isinstance(value, dict):
        raise ApiFault(f"{call}: the reply is not an object.")
    return value
