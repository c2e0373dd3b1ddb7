"""Who is calling: header signatures, body signatures, and validators' signed requests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, HTTPException, Request
from sqlalchemy import delete
from sqlalchemy.orm import Session

from neurons.runtime.identity import verify
from neurons.runtime.values import HOTKEY, LOOPBACK
from neurons.validator_api.config import ApiConfig, utc
from neurons.validator_api.database.tables import UsedNonce
from neurons.wire import protocol
from neurons.wire.binding import bound_text, request_text
from neurons.wire.protocol import ClaimRequest, CommitRequest, SubmitRequest

SKEW_SECONDS = 60
"""How far a validator's clock may be from the server's."""

_HEX = re.compile(r"(?:[0-9A-Fa-f]{2})+")
_TIMESTAMP = re.compile(r"[0-9]{1,12}")
_NONCE = re.compile(r"[0-9a-f]{32,64}")


def _claimed(request: Request) -> tuple[str, str]:
    """Return the hotkey and the signature that the headers name, else 401."""
    hotkey = request.headers.get(protocol.HOTKEY_HEADER)
    signature = request.headers.get(protocol.SIGNATURE_HEADER)
    if not hotkey or not signature:
        raise HTTPException(401, "Missing Hotkey or Signature headers")
    if not _HEX.fullmatch(signature):
        raise HTTPException(401, "Invalid signature format. Expected hex string")
    if not HOTKEY.fullmatch(hotkey):
        raise HTTPException(401, "Authentication error: the Hotkey header is not an ss58 address")
    return hotkey, signature


@lru_cache(maxsize=4096)
def _is_credential(hotkey: str, signature: str) -> bool:
    """Tell whether the signature is the hotkey's of its own address, which never changes."""
    return verify(hotkey, hotkey, signature)


def authenticated(request: Request) -> str:
    """Return the hotkey whose signature of its own address the headers carry, else 401."""
    hotkey, signature = _claimed(request)
    if not _is_credential(hotkey, signature):
        raise HTTPException(401, "Invalid signature")
    return hotkey


def check_fork_url(fork_url: str, config: ApiConfig) -> None:
    """Refuse a fork that no validator elsewhere can clone, and text that is no address."""
    try:
        parts = urlsplit(fork_url)
    except ValueError:  # such as https://[
        parts = urlsplit("")
    local = parts.scheme == "file" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
    if config.allow_file_forks and local and fork_url.isprintable():
        return
    plain = parts.scheme == "https" and parts.hostname and "@" not in parts.netloc
    if not plain or not fork_url.isascii() or not fork_url.isprintable() or " " in fork_url:
        raise HTTPException(
            400,
            "fork_url must be a plain https address; an API with ALLOW_FILE_FORKS=true takes "
            "file:// as well",
        )


@dataclass(frozen=True)
class ValidatorCall:
    """A request that a validator has signed as a whole.

    Attributes:
        made_at: when it came, in naive UTC.
        expires_at: from then on its time is refused, so that its nonce may be forgotten.
    """

    hotkey: str
    nonce: str
    made_at: datetime
    expires_at: datetime

    def spend(self, session: Session) -> None:
        """Take the nonce, once: a request that somebody sends again is refused with 401."""
        session.execute(delete(UsedNonce).where(UsedNonce.expires_at <= self.made_at))
        if session.get(UsedNonce, (self.hotkey, self.nonce)) is not None:
            raise HTTPException(401, "Nonce was used before")
        session.add(UsedNonce(hotkey=self.hotkey, nonce=self.nonce, expires_at=self.expires_at))
        session.flush()


async def validator(request: Request) -> ValidatorCall:
    """Return the validator's call whose path, query, body, nonce and time are signed.

    401 without a valid signature of just this request, 403 when the hotkey is no validator.
    """
    config: ApiConfig = request.app.state.api.config
    hotkey, signature = _claimed(request)
    timestamp = request.headers.get(protocol.TIMESTAMP_HEADER, "")
    nonce = request.headers.get(protocol.NONCE_HEADER, "")
    if not _TIMESTAMP.fullmatch(timestamp) or not _NONCE.fullmatch(nonce):
        raise HTTPException(
            401,
            "Invalid signature: a validator signs each request, with the headers Timestamp "
            "(Unix seconds) and Nonce (32 to 64 hex digits)",
        )
    now = config.wall_clock()
    if abs(int(timestamp) - now) > SKEW_SECONDS:
        raise HTTPException(401, f"Timestamp is more than {SKEW_SECONDS} s from the server's time")
    query = request.scope["query_string"].decode("latin-1")
    target = request.url.path + (f"?{query}" if query else "")
    text = request_text(request.method, target, timestamp, nonce, await request.body())
    if not verify(hotkey, text, signature):
        raise HTTPException(401, "Invalid signature")
    if not request.app.state.api.is_validator(hotkey):
        raise HTTPException(403, "Only validators may do this")
    return ValidatorCall(hotkey, nonce, utc(now), utc(int(timestamp) + SKEW_SECONDS + 1))


Validator = Annotated[ValidatorCall, Depends(validator)]


def check_same_hotkey(claimed: str, hotkey: str) -> None:
    """Refuse a body that speaks for another hotkey than the headers prove."""
    if claimed != hotkey:
        raise HTTPException(403, "Hotkey mismatch")


def check_signed(route: str, body: CommitRequest | ClaimRequest) -> None:
    """Refuse a body whose `signature` is not its hotkey's: of all of it in version 2."""
    if body.version is not None:
        texts = [bound_text(route, body)]
    elif isinstance(body, CommitRequest):
        texts = [body.commitment_hash]
    else:
        texts = public_texts(body)
    if not any(verify(body.miner_hotkey, text, body.signature) for text in texts):
        raise HTTPException(401, "Invalid signature")


def public_texts(body: ClaimRequest) -> list[str]:
    """Return the texts that `body.signature` may sign on the public wire.

    The subnet's reference miner keeps its benchmarks under integers and so signs the lengths in
    numeric order, and signs nothing in their place when it sends none.
    """
    repo_hash = body.repo_hash if isinstance(body, SubmitRequest) else None
    start = f"{body.fork_url}{body.commit_hash}{body.tokens_per_sec}"
    canonical = protocol.submission_text(
        body.fork_url, body.commit_hash, body.tokens_per_sec, body.benchmarks, repo_hash
    )
    if body.benchmarks is None:
        return [canonical, f"{start}{repo_hash or ''}"]
    numeric = {int(length): figures for length, figures in body.benchmarks.items()}
    return [canonical, f"{start}{json.dumps(numeric, sort_keys=True)}{repo_hash or ''}"]
