"""Failures of a request to the validator API, one type each.

Each is a Retry or a Held, so that a caller without special handling reacts correctly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timezone
from email.utils import parsedate_to_datetime

from neurons.runtime.errors import Held, HeldUntilRelease, Retry
from neurons.runtime.observe import redact_text

DETAIL_BYTES = 2**13
TITLE_LETTERS = 80
BROKEN_SERVER_SECONDS = 600.0

_LONG_HEX = re.compile(r"[0-9a-fA-F]{64,}")  # a salt or a signature that the server echoes
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_HOURS_LEFT = re.compile(r"([0-9]+(?:\.[0-9]+)?) more hours")


class Unreachable(Retry):
    """The request certainly did not reach the server, because there was no connection."""


class Untrusted(Retry):
    """The certificate is not trusted, so nothing was sent."""


class Banned(Retry):
    """403: the server refuses this machine's address for some hours, which it may name."""


class Busy(Retry):
    """The server did not process the request (429, 503 or its own fault); it may name a pause."""


class TooEarly(Retry):
    """425: the reveal block has not come yet."""


class Uncertain(Retry):
    """The server may have processed the request, but no usable reply confirms it.

    The caller must read the server's lists before it repeats the request.
    """


class ReplyLost(Uncertain):
    """The request was sent, but the connection broke or no complete reply came in time."""


class ServerFault(Uncertain):
    """A 5xx other than 503."""


class ForeignPage(Uncertain):
    """A reply that the API did not write: a proxy's page, a redirect, or an unknown route.

    It does not show whether the submission arrived, and its cause may be temporary.
    """


class ProtocolFault(Uncertain):
    """A reply that violates the protocol: not JSON, NaN, wrong types."""


class ReadRefused(Uncertain):
    """A 4xx with a message for an unsigned GET, which shows nothing about a submission."""


class TooLarge(ProtocolFault):
    """A reply beyond the size limit."""


class Refused(Held):
    """A 4xx with the API's own message; a retry would give the same result."""


class Unauthorized(Refused):
    """401: the server does not accept the signature."""


class Forbidden(Refused):
    """403: this hotkey may not make the call."""


class NotOnSubnet(Forbidden):
    """403: the hotkey is not registered on the chain's subnet."""


class NotRegistered(Refused):
    """404: the hotkey has to be registered first."""


class SubmissionNotFound(Refused):
    """404: the server does not know this submission of this hotkey."""


class AlreadyCommitted(Refused):
    """409: the server holds this commitment hash already."""


class AlreadyRevealed(Refused):
    """409: the server holds this reveal already."""


class RevealRefused(Refused, HeldUntilRelease):
    """400, or another status that may count as a failure; five failures ban the address."""


class HashMismatch(RevealRefused):
    """400: the hash of the revealed values is not the commitment; a repetition never succeeds."""


def fault_of(
    route: str, status: int, headers: Mapping[str, str], body: bytes, now: float
) -> Retry | Held:
    """Return the exception for a reply to `route` with another status than 2xx.

    A Retry-After date is converted to seconds from `now`.
    """
    detail = api_detail(body)
    text = page_title(body) if detail is None else detail
    reason = f"{route} answered {status}" + (f": {text}" if text else "")
    after = retry_after(headers.get("Retry-After"), now)
    if status in (429, 503):
        return Busy(reason, after)
    if status >= 500:
        return ServerFault(reason, after)
    if status == 408:
        return ReplyLost(reason, after)
    if 300 <= status < 400:
        target = redact_text(headers.get("Location", "nowhere"))
        return ForeignPage(
            f"{route} is redirected to {target}, and redirects are not followed, because the "
            "signature header is a credential. If this continues, set VALIDATOR_API_URL to the "
            "address that answers without a redirect",
            after,
        )
    if detail is None or (status, detail) in _UNKNOWN_ROUTE:
        return ForeignPage(
            f"{reason} (not a reply of the validator API; if this continues, check "
            "VALIDATOR_API_URL)",
            after,
        )
    if status == 425:
        return TooEarly(reason, after)
    if status == 401 and "Keypair was removed" in detail:
        return Busy(
            f"{reason} (the server's own fault: it cannot verify any signature)",
            after or BROKEN_SERVER_SECONDS,
        )
    if (status, detail) == _DAMAGED_REQUEST or (
        status == 401 and detail.startswith("Authentication error")
    ):
        return Busy(
            f"{reason} (the server's own fault: the request did not reach its route)", after
        )
    if status == 403 and "banned" in detail.lower():
        hours = _HOURS_LEFT.search(detail)
        return Banned(
            f"{reason} (five failures ban an address for 24 hours; find out why the last "
            "submissions failed)",
            3600.0 * float(hours[1] if hours else 1.0),
        )
    return _refusal(route, status, detail, f"{reason}.")


_UNKNOWN_ROUTE = ((404, "Not Found"), (405, "Method Not Allowed"))
"""FastAPI's replies for an unknown route: the server is another version or another program."""

_DAMAGED_REQUEST = (400, "There was an error parsing the body")
"""FastAPI's reply to a request body that is truncated or damaged."""


_NOT_COUNTED = (401, 403, 404, 409, 422)
"""Refusals of a reveal that do not count towards a ban."""


def _refusal(route: str, status: int, detail: str, reason: str) -> Refused:
    text = detail.lower()
    if status == 401:
        return Unauthorized(
            reason,
            "Check WALLET_MINER_NAME and WALLET_HOTKEY, and that this program is up to date.",
        )
    if status == 403 and "mismatch" in text:
        return Forbidden(reason, "Check that all programs use the same WALLET_HOTKEY.")
    if status == 403 and "not registered on subnet" in text:
        return NotOnSubnet(reason, "Register the hotkey on the chain, then start the miner again.")
    if status == 403:
        return Forbidden(reason, "Check that WALLET_HOTKEY is the hotkey that may do this.")
    if status == 404 and "not registered" in text:
        return NotRegistered(
            reason, "Register the hotkey with the subnet (btcli subnets register)."
        )
    if status == 404 and "submission not found" in text:
        return SubmissionNotFound(reason, "Check VALIDATOR_API_URL: it may name another server.")
    if status == 409 and "already revealed" in text:
        return AlreadyRevealed(reason, "Nothing: it is done.")
    if status == 409 and "already exists" in text:
        return AlreadyCommitted(reason, "Look for the commitment in /pending_reveals.")
    if status == 400 and "mismatch" in text:
        return HashMismatch(
            reason, "Do not reveal it again: five failures ban this address for 24 hours."
        )
    if route == "/reveal_submission" and status not in _NOT_COUNTED:
        return RevealRefused(
            reason,
            "Read the server's message. `release` sends the reveal again, which may count towards "
            "a ban; `abandon` ends the submission.",
        )
    if status == 422:
        return Refused(reason, "The server's message format has changed: update this program.")
    return Refused(
        reason, "Read the server's message. If this continues, `abandon` ends the submission."
    )


def api_detail(body: bytes) -> str | None:
    """Return the reply's `detail` on one line, without echoed data; None if it has none."""
    try:
        detail = json.loads(body)["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(detail, list):  # FastAPI's 422; `input` is omitted because it repeats the body
        rows = [row for row in detail if isinstance(row, dict)]
        detail = "; ".join(f"{_place(row.get('loc'))}: {row.get('msg')}" for row in rows)
    return _on_one_line(str(detail)[:DETAIL_BYTES])


def page_title(body: bytes) -> str:
    """Return the title of an HTML page, or the beginning of any other text, on one line."""
    text = body[:DETAIL_BYTES].decode(errors="replace")
    title = _TITLE.search(text)
    return _on_one_line(" ".join((title[1] if title else text).split())[:TITLE_LETTERS])


def _on_one_line(text: str) -> str:
    return redact_text(_LONG_HEX.sub("[redacted]", text))


def _place(location: object) -> str:
    return ".".join(map(str, location)) if isinstance(location, list) else "?"


def retry_after(value: str | None, now: float) -> float | None:
    """Return a Retry-After header, seconds or an HTTP date, as seconds from `now`."""
    if not value:
        return None
    if re.fullmatch(r"[0-9]+", value.strip()):
        return float(value.strip()[:9])
    date = http_date(value)
    return None if date is None else max(0.0, date - now)


def http_date(value: str) -> float | None:
    """Return an HTTP date as Unix seconds; None if `value` is not a date."""
    try:
        date = parsedate_to_datetime(value)
        if date.tzinfo is None:
            date = date.replace(tzinfo=timezone.utc)
        return date.timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
