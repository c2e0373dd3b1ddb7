"""Which headers, times, nonces and addresses are accepted, at each limit, without a server."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException, Request

from neurons.validator_api import auth
from neurons.wire.protocol import CommitRequest
from tests.neurons.live_api import ALICE, BOB, commitment

NOW = 1_770_000_000.0
MOMENT = datetime.fromisoformat("2026-02-02T02:40:00")
"""The same moment in naive UTC."""

PATH = "/mark_validated"


def request(
    headers: dict[str, str],
    body: bytes = b"",
    *,
    query: str = "",
    now: float = NOW,
    validators: tuple[str, ...] = (ALICE.hotkey,),
) -> Request:
    """Return what a server would hand on, at a server whose clock says `now`."""
    api = SimpleNamespace(wall_clock=lambda: now, is_validator=lambda who: who in validators)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "app": SimpleNamespace(state=SimpleNamespace(api=api)),
    }
    return Request(scope, receive)


def called(*args: Any, **options: Any) -> auth.ValidatorCall:
    return asyncio.run(auth.validator(request(*args, **options)))


def refusal(act: Any, *args: Any, **options: Any) -> tuple[int, str]:
    with pytest.raises(HTTPException) as caught:
        act(*args, **options)
    return caught.value.status_code, str(caught.value.detail)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"Signature": "0xzz"}, "Invalid signature format. Expected hex string"),
        ({"Signature": "abc"}, "Invalid signature format. Expected hex string"),
        ({"Hotkey": "nobody"}, "Authentication error: the Hotkey header is not an ss58 address"),
        # Alice's key in the format of another network
        (
            {"Hotkey": "15oF4uVJwmo4TdGW7VfQxNLavjCXviqxT9S1MgbjMNHr6Sp5"},
            "Authentication error: the Hotkey header is not an ss58 address",
        ),
        ({"Hotkey": "0" * 48}, "Authentication error: the Hotkey header is not an ss58 address"),
    ],
)
def test_headers_of_another_form_are_refused(change: dict[str, str], text: str) -> None:
    assert refusal(auth.authenticated, request(ALICE.headers() | change)) == (401, text)


@pytest.mark.parametrize("offset", [-60, 0, 60])
def test_a_validators_clock_may_be_a_minute_off(offset: int) -> None:
    headers = ALICE.bound_headers("POST", PATH, NOW + offset, b"{}")
    call = called(headers, b"{}")
    assert (call.hotkey, call.nonce, call.made_at) == (ALICE.hotkey, headers["Nonce"], MOMENT)
    # The first moment, to the second, at which this time would be refused.
    assert call.expires_at == call.made_at + timedelta(seconds=offset + 61)


@pytest.mark.parametrize("now", [NOW - 61, NOW + 60.5])
def test_a_clock_that_differs_by_more_is_refused(now: float) -> None:
    late = (401, "Timestamp is more than 60 s from the server's time")
    assert refusal(called, ALICE.bound_headers("POST", PATH, NOW), now=now) == late


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("Nonce", value) for value in ("", "a" * 31, "a" * 65, "A" * 32, "g" * 32)),
        *(("Timestamp", value) for value in ("", "-1", "1.5", "1" * 13, "1e9")),
    ],
)
def test_a_time_or_nonce_of_another_form_is_refused(name: str, value: str) -> None:
    headers = ALICE.bound_headers("POST", PATH, NOW) | {name: value}
    status, text = refusal(called, headers)
    assert status == 401
    assert text.startswith("Invalid signature: a validator signs each request")


def test_a_commitment_is_signed_by_its_hash_and_by_its_own_hotkey() -> None:
    body = CommitRequest(**commitment(ALICE))
    auth.check_signed("/commit_submission", body)
    refused = (401, "Invalid signature")
    for change in ({"miner_hotkey": BOB.hotkey}, {"commitment_hash": "0" * 64}, {"version": 2}):
        other = body.model_copy(update=change)
        assert refusal(auth.check_signed, "/commit_submission", other) == refused


@pytest.mark.parametrize(
    ("fork", "at_home", "away"),
    [
        ("https://github.com/a/b", True, True),
        ("file:///srv/fork.git", True, False),
        ("http://127.0.0.1:3000/a/b", True, False),
        ("http://example.org/a/b", False, False),
        ("ssh://git@github.com/a/b", False, False),
        ("https://user:secret@github.com/a/b", False, False),
        ("https://github.com/a/\u202eb", False, False),
        ("https://github.com/a b; curl x | sh", False, False),
        ("https://[", False, False),
        ("/etc", False, False),
    ],
)
def test_a_fork_has_a_plain_https_address(fork: str, at_home: bool, away: bool) -> None:
    for taken, allowed in ((at_home, True), (away, False)):
        if taken:
            auth.check_fork_url(fork, allow_files=allowed)
        else:
            with pytest.raises(HTTPException, match="plain https address"):
                auth.check_fork_url(fork, allow_files=allowed)
