"""What can come back from the validator API other than the answer, one type each.

Each is a Retry or a Held, so that a caller that knows no better does the right thing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timezone
from email.utils import parsedate_to_datetime

from neurons.errors import Held, Retry
from neurons.mining.gitfaults import redact_text

DETAIL_BYTES = 2**13
BROKEN_SERVER_SECONDS = 600.0

_LONG_HEX = re.compile(r"[0-9a-fA-F]{64,}")  # a salt or a signature that the server echoes


class Unreachable(Retry):
    """The request certainly did not reach the server: no address, refused, no connection."""


class Busy(Retry):
    """429 or 503: the server did not take the request, and may have named a pause."""


class TooEarly(Retry):
    """425: the reveal block has not come yet."""


class Uncertain(Retry):
    """The request may have been carried out, and no usable reply says so: look it up first."""


class ReplyLost(Uncertain):
    """The request was sent and the connection broke, or no reply came in time."""


class ServerFault(Uncertain):
    """A 5xx."""


class ProtocolFault(Uncertain):
    """A reply that is not what the protocol says: not JSON, NaN, wrong types, too large."""


class Refused(Held):
    """A 3xx or 4xx that trying again would not change."""


class Unauthorized(Refused):
    """401: the server does not accept the signature."""


class Forbidden(Refused):
    """403: this caller may not do that."""


class HotkeyMismatch(Forbidden):
    """403: the body names another hotkey than the header."""


class Banned(Forbidden):
    """403: the server refuses this machine's address for a day."""


class NotRegistered(Refused):
    """404: the hotkey has to be registered first."""


class SubmissionNotFound(Refused):
    """404: the server does not know this submission of this hotkey."""


class AlreadyCommitted(Refused):
    """409: the server holds this commitment hash already."""


class AlreadyRevealed(Refused):
    """409: the server holds this reveal already."""


class HashMismatch(Refused):
    """400: salt and URL do not give the commitment. Five of these ban the address."""


def fault_of(
    route: str, status: int, headers: Mapping[str, str], body: bytes, now: float
) -> Retry | Held:
    """Return what the reply `status` to a request of `route` means.

    Args:
        route: the path, such as `/commit_submission`, for the text.
        status: the HTTP status, not a 2xx.
        headers: of the reply, with case-insensitive names.
        body: of the reply.
        now: Unix seconds, against which a Retry-After date counts.
    """
    detail = detail_of(body)
    said = f"{route} answered {status}" + (f": {detail}" if detail else "")
    after = retry_after(headers.get("Retry-After"), now)
    if status in (429, 503):
        return Busy(said, after)
    if status >= 500:
        return ServerFault(said, after)
    if status == 408:
        return ReplyLost(said, after)
    if status == 425:
        return TooEarly(said, after)
    if status == 401 and "Keypair was removed" in detail:
        return Busy(
            f"{said} (the server's own fault: it cannot verify any signature)",
            after or BROKEN_SERVER_SECONDS,
        )
    if 300 <= status < 400:
        target = redact_text(headers.get("Location", "nowhere"))
        return Refused(
            f"{route} is redirected to {target}; redirects are not followed, "
            "because the signature header is a credential.",
            "Set VALIDATOR_API_URL to the address that answers itself.",
        )
    return _refusal(status, detail, f"{said}.")


def _refusal(status: int, detail: str, said: str) -> Refused:
    text = detail.lower()
    if status == 401:
        return Unauthorized(
            said, "Check WALLET_MINER_NAME and WALLET_HOTKEY, and that this program is up to date."
        )
    if status == 403 and "banned" in text:
        return Banned(
            said,
            "The server refuses this machine's address for 24 hours after five failures. Find out "
            "why the last submissions failed, then wait until the ban has ended.",
        )
    if status == 403 and "mismatch" in text:
        return HotkeyMismatch(said, "Check that one wallet is used: WALLET_HOTKEY.")
    if status == 403:
        return Forbidden(said, "Check that WALLET_HOTKEY is the hotkey that may do this.")
    if status == 404 and "not registered" in text:
        return NotRegistered(said, "Register the hotkey with the subnet (btcli subnets register).")
    if status == 404 and "submission not found" in text:
        return SubmissionNotFound(said, "Check VALIDATOR_API_URL: it is another server.")
    if status == 404:
        return Refused(said, "Check VALIDATOR_API_URL: this address has no such route.")
    if status == 409 and "already revealed" in text:
        return AlreadyRevealed(said, "Nothing: it is done.")
    if status == 409 and "already exists" in text:
        return AlreadyCommitted(said, "Look for the commitment in /pending_reveals.")
    if status == 400 and "mismatch" in text:
        return HashMismatch(
            said, "Do not reveal it again: five such failures ban this address for 24 hours."
        )
    if status == 422:
        return Refused(said, "The server's message format has changed: update this program.")
    return Refused(said, "Read the server's message; then let the submission go on, or abandon it.")


def detail_of(body: bytes) -> str:
    """Return the reply's `detail` on one line, without what it may echo of the request."""
    text = body[:DETAIL_BYTES].decode(errors="replace")
    try:
        detail = json.loads(body)["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        detail = text
    if isinstance(detail, list):  # FastAPI's 422: `input` repeats the body, so take the rest
        rows = [row for row in detail if isinstance(row, dict)]
        detail = "; ".join(f"{_place(row.get('loc'))}: {row.get('msg')}" for row in rows)
    return redact_text(_LONG_HEX.sub("[redacted]", str(detail)))


def _place(location: object) -> str:
    return ".".join(map(str, location)) if isinstance(location, list) else "?"


def retry_after(value: str | None, now: float) -> float | None:
    """Return a Retry-After header, seconds or an HTTP date, as seconds from `now`."""
    if not value:
        return None
    if re.fullmatch(r"[0-9]+", value.strip()):
        return float(value.strip()[:9])
    moment = http_date(value)
    return None if moment is None else max(0.0, moment - now)


def http_date(value: str) -> float | None:
    """Return an HTTP date as Unix seconds, None when it is not one."""
    try:
        moment = parsedate_to_datetime(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        return moment.timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
