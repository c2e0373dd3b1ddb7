"""The exceptions for error replies: type, pause, detail and remedy."""

import json
from email.utils import formatdate

import httpx
import pytest

from neurons.runtime.errors import Held, Retry
from neurons.wire import outcomes

NOW = 1_700_000_000.0


def fault(status: int, body: bytes | object = b"", **headers: str) -> Retry | Held:
    content = body if isinstance(body, bytes) else json.dumps({"detail": body}).encode()
    named = httpx.Headers({name.replace("_", "-"): value for name, value in headers.items()})
    return outcomes.fault_of("/route", status, named, content, NOW)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, outcomes.ServerFault) for status in (500, 501, 502, 504, 599)),
        *((status, outcomes.Busy) for status in (429, 503)),
        (408, outcomes.ReplyLost),
        *((status, outcomes.ForeignPage) for status in (300, 301, 307, 399)),
        (425, outcomes.TooEarly),
    ],
)
def test_retry_after_is_kept_for_every_retry(status, kind):
    error = fault(status, "words", Retry_After="17")
    assert type(error) is kind
    assert isinstance(error, Retry)
    assert error.after == 17.0
    without = fault(status, "words")
    assert isinstance(without, Retry)
    assert without.after is None


@pytest.mark.parametrize(
    ("status", "detail", "kind", "remedy"),
    [
        (401, "Invalid signature", outcomes.Unauthorized, "WALLET_MINER_NAME"),
        (403, "Hotkey MISMATCH", outcomes.Forbidden, "same WALLET_HOTKEY"),
        (400, "Hash mismatch", outcomes.HashMismatch, "Do not reveal it again"),
        (403, "Only validators", outcomes.Forbidden, "the hotkey that may do this"),
        (403, "Hotkey 5x is not registered on subnet 24", outcomes.NotOnSubnet, "on the chain"),
        (401, "There was an error parsing the body", outcomes.Unauthorized, "WALLET_HOTKEY"),
        (404, "Miner NOT registered", outcomes.NotRegistered, "btcli subnets register"),
        (404, "Submission not found", outcomes.SubmissionNotFound, "another server"),
        (404, "No such thing", outcomes.Refused, "Read the server's message"),
        (409, "Submission ALREADY revealed", outcomes.AlreadyRevealed, "it is done"),
        (409, "Commitment already exists", outcomes.AlreadyCommitted, "/pending_reveals"),
        (422, "field required", outcomes.Refused, "update this program"),
    ],
)
def test_status_and_detail_determine_type_and_remedy(status, detail, kind, remedy):
    error = fault(status, detail)
    assert type(error) is kind
    assert isinstance(error, Held)
    assert error.reason == f"/route answered {status}: {detail}."
    assert remedy in error.remedy


def test_a_server_that_cannot_verify_signatures_is_retried_after_ten_minutes() -> None:
    words = "Authentication error: Keypair was removed in bittensor 11"
    for error, after in ((fault(401, words), 600.0), (fault(401, words, Retry_After="7"), 7.0)):
        assert isinstance(error, outcomes.Busy)
        assert error.after == after


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 422, 425])
@pytest.mark.parametrize("page", [b"<html>", b"", b"[]"])
def test_a_reply_without_a_detail_is_not_the_apis(status: int, page: bytes) -> None:
    assert type(fault(status, page)) is outcomes.ForeignPage


@pytest.mark.parametrize(
    ("status", "detail", "kind"),
    [
        (401, "Authentication error: database is locked", outcomes.Busy),  # the server's catch-all
        (400, "There was an error parsing the body", outcomes.Busy),  # a truncated body
        (404, "Not Found", outcomes.ForeignPage),
        (405, "Method Not Allowed", outcomes.ForeignPage),
    ],
)
def test_a_request_that_did_not_reach_its_route_is_retried(status, detail, kind):
    error = fault(status, detail, Retry_After="7")
    assert isinstance(error, Retry)
    assert (type(error), error.after) == (kind, 7.0)


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("IP address banned: IP banned for 23.5 more hours", 84600.0),
        ("IP address banned: IP banned for 0.0 more hours", 0.0),
        ("BANNED", 3600.0),
    ],
)
def test_row_08_a_ban_lasts_the_named_hours_or_one(words: str, seconds: float) -> None:
    error = fault(403, words)
    assert isinstance(error, outcomes.Banned)
    assert error.after == seconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        (" 12 ", 12.0),
        ("1234567899", 123456789.0),
        (formatdate(NOW + 90, usegmt=True), 90.0),
        (formatdate(NOW - 90, usegmt=True), 0.0),
        (formatdate(NOW + 90, usegmt=True).replace("GMT", "-0000"), 90.0),
        (formatdate(NOW + 90, usegmt=True).replace("GMT", "+0100"), 0.0),
        *((senseless, None) for senseless in ("soon", "-1", "1e3", "\u00b2", "Wed, 99 Foo 2099")),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert outcomes.retry_after(value, NOW) == seconds


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"detail": "two\\nlines"}', "two lines"),
        (b'{"detail": ""}', ""),
        (b'{"detail": {"a": 1}}', "{'a': 1}"),
        (b'{"other": 1}', None),
        (b"[1]", None),
        (b"", None),
        (b"\xff\xfe", None),
        (b"[" * 200_000, None),
        (b'{"detail": [{"loc": ["body", 3], "msg": "bad", "input": "secret"}, 5]}', "body.3: bad"),
        (b'{"detail": [{"loc": 1, "msg": "a"}, {"msg": "b"}]}', "?: a; ?: b"),
    ],
)
def test_the_detail_of_a_reply(body: bytes, detail: str | None) -> None:
    assert outcomes.api_detail(body) == detail


def test_details_are_truncated_and_long_hex_is_redacted() -> None:
    long = json.dumps({"detail": "x" * 10_000}).encode()
    assert outcomes.api_detail(long) == "x" * 300
    secret = json.dumps({"detail": f"sent {'aB' * 32} here, {'1' * 63}"}).encode()
    assert outcomes.api_detail(secret) == f"sent [redacted] here, {'1' * 63}"


@pytest.mark.parametrize(
    ("page", "title"),
    [
        (b"<TITLE lang='en'>Bad\n  Gateway</TITLE><p>more", "Bad Gateway"),
        (b"plain  words\n", "plain words"),
        (b"y" * 200, "y" * 80),
        (b" " * 8190 + b"late", "la"),  # 8 KiB are read
        (b"caf\xe9", "caf\ufffd"),
    ],
)
def test_the_title_or_the_beginning_of_a_page(page: bytes, title: str) -> None:
    assert outcomes.page_title(page) == title
