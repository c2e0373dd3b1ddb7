"""Whole-request signatures of validators: signing by clients, verification by servers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neurons.runtime.identity import Identity, verify
from neurons.wire.protocol import (
    HOTKEY_HEADER,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    request_text,
)

SKEW_SECONDS = 60
"""Largest difference in seconds between a validator's clock and the server's."""

_TIMESTAMP = re.compile(r"[0-9]{1,12}")
_NONCE = re.compile(r"[0-9a-f]{32,64}")


class NotSigned(Exception):
    """The headers do not sign this request, or its time differs from the server's."""


@dataclass(frozen=True)
class SignedRequest:
    """A request with a valid signature."""

    hotkey: str
    nonce: str  # the server accepts it once
    expires_at: int  # Unix time from which the timestamp is rejected and the nonce can be deleted


def signed_headers(
    signer: Identity, method: str, target: str, body: bytes, now: float, recipient: str = ""
) -> dict[str, str]:
    """Return the headers that sign a request to `target`, at the server's time `now`.

    `recipient` is the hotkey of the miner that a request to an inference server is for.
    """
    timestamp, nonce = str(round(now)), secrets.token_hex(16)
    text = request_text(method, target, timestamp, nonce, body, recipient)
    return {
        HOTKEY_HEADER: signer.hotkey,
        SIGNATURE_HEADER: signer.sign(text),
        TIMESTAMP_HEADER: timestamp,
        NONCE_HEADER: nonce,
    }


def check_signed_request(
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes,
    now: float,
    recipients: Sequence[str] = ("",),
) -> SignedRequest:
    """Return the request if its method, target, body, nonce, time and recipient are signed.

    Raises NotSigned, with a message for the client, if signature, nonce or time is invalid.
    """
    hotkey, signature = headers.get(HOTKEY_HEADER, ""), headers.get(SIGNATURE_HEADER, "")
    timestamp, nonce = headers.get(TIMESTAMP_HEADER, ""), headers.get(NONCE_HEADER, "")
    if not _TIMESTAMP.fullmatch(timestamp) or not _NONCE.fullmatch(nonce):
        raise NotSigned(
            "Invalid signature: a validator signs each request, with the headers Timestamp "
            "(Unix seconds) and Nonce (32 to 64 hex digits)"
        )
    if abs(int(timestamp) - now) > SKEW_SECONDS:
        raise NotSigned(f"Timestamp is more than {SKEW_SECONDS} s from the server's time")
    texts = (request_text(method, target, timestamp, nonce, body, one) for one in recipients)
    if not any(verify(hotkey, text, signature) for text in texts):
        raise NotSigned("Invalid signature")
    return SignedRequest(hotkey, nonce, int(timestamp) + SKEW_SECONDS + 1)
