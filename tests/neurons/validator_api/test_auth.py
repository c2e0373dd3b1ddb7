"""Accepted and refused timestamps, nonces, signatures and fork addresses, without a server."""

from contextlib import nullcontext

import pytest
from fastapi import HTTPException

from neurons.validator_api import auth
from neurons.wire.signed_request import NotSigned, check_signed_request, signed_headers
from tests.neurons.live_api import ALICE

NOW = 1_770_000_000.0
REQUEST = ("POST", "/mark_validated")


@pytest.mark.parametrize("offset", [-60, 0, 60])
def test_a_validators_clock_may_be_a_minute_off(offset: int) -> None:
    headers = signed_headers(ALICE, *REQUEST, b"{}", NOW + offset)
    signed = check_signed_request(*REQUEST, headers, b"{}", NOW)
    assert (signed.hotkey, signed.nonce) == (ALICE.hotkey, headers["Nonce"])
    # The first full second in which this timestamp is refused.
    assert signed.expires_at == NOW + offset + 61


MALFORMED = "Invalid signature: a validator signs each request"
LATE = "Timestamp is more than 60 s from the server's time"


@pytest.mark.parametrize(
    ("header", "now", "message"),
    [
        ({}, NOW - 61, LATE),
        ({}, NOW + 60.5, LATE),
        *(({"Nonce": nonce}, NOW, MALFORMED) for nonce in ("a" * 31, "a" * 65, "A" * 32)),
        *(({"Timestamp": time}, NOW, MALFORMED) for time in ("", "1.5", "1" * 13)),
    ],
)
def test_a_late_or_malformed_timestamp_or_nonce_is_refused(header, now, message):
    headers = signed_headers(ALICE, *REQUEST, b"", NOW) | header
    with pytest.raises(NotSigned, match=message):
        check_signed_request(*REQUEST, headers, b"", now)


@pytest.mark.parametrize(
    ("fork", "with_file_forks", "without"),
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
def test_a_fork_has_a_plain_https_address(fork: str, with_file_forks: bool, without: bool) -> None:
    for allow_files, accepted in ((True, with_file_forks), (False, without)):
        refused = pytest.raises(HTTPException, match="plain https address")
        with nullcontext() if accepted else refused:
            auth.check_fork_url(fork, allow_files=allow_files)
