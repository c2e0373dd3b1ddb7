"""Requests that schemathesis makes of the API's own OpenAPI: none is a 500.

Each is signed as its route wants, so that what it says comes as far as the database.
`QUASAR_FUZZ_EXAMPLES=1000` asks for more of each route.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from pydantic import ValidationError
from schemathesis import Case
from schemathesis.core.result import Err

from neurons.wire.protocol import CommitRequest, RevealRequest, SubmitRequest, bound_text
from tests import postgresql
from tests.neurons.live_api import ALICE, FORK, VALIDATOR, LiveApi, serve
from tests.processes import HANG

EXAMPLES = int(os.environ.get("QUASAR_FUZZ_EXAMPLES", "5"))
BOUND = {
    "/submit_kernel": SubmitRequest,
    "/commit_submission": CommitRequest,
    "/reveal_submission": RevealRequest,
}
KNOWN = {
    "hotkey": ALICE.hotkey,
    "miner_hotkey": ALICE.hotkey,
    "league": "1M",
    "fork_url": FORK,
    "commit_hash": "a" * 40,
    "commitment_hash": "b" * 64,
}
"""What no chance would find, and without which nothing gets far."""


@pytest.fixture
def api(tmp_path: Path, server: postgresql.Server) -> Iterator[LiveApi]:
    """An API on the stricter database, with a submission and a commitment: numbers 1 and 2."""
    with serve(tmp_path, database_url=server.new_database()) as live:
        live.register(ALICE)
        live.submit(ALICE, 5.0)
        live.commit(ALICE)
        yield live


def test_no_request_of_the_schema_is_a_500(api: LiveApi) -> None:
    schema = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations() if not isinstance(found, Err)]
    assert len(operations) >= 17
    statuses: Counter[tuple[str, int]] = Counter()
    with requests.Session() as session:
        for operation in operations:
            chosen = settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=EXAMPLES < 100,
                suppress_health_check=list(HealthCheck),
            )

            @chosen
            @given(case=operation.as_strategy())
            def send(case: Case) -> None:
                reply = session.send(signed(case, api.url), timeout=HANG)
                statuses[case.path, reply.status_code] += 1
                assert reply.status_code < 500, (case.as_curl_command(), reply.text)
                reply.json()

            send()
    taken = {path for path, status in statuses if status == 200}
    assert {"/health", "/get_current_round", "/register_miner", "/submit_kernel"} <= taken
    assert not any(status == 401 for _, status in statuses)  # each got past its signature


def signed(case: Case, url: str) -> requests.PreparedRequest:
    """Return the request as the miner or the validator would sign it."""
    body: Any = case.body
    if isinstance(body, dict):
        known = {name: value for name, value in KNOWN.items() if name in body}
        body = {**body, **known}
        if isinstance(body.get("submission_id"), int):
            body["submission_id"] %= 4  # of a row that is there, for the most part
        if case.path in BOUND:
            body = {**body, "version": 2}
            with suppress(ValidationError):
                text = bound_text(case.path, BOUND[case.path](**body))
                body = {**body, "signature": ALICE.sign(text)}
    written = case.method == "POST" and case.operation.body
    content = json.dumps(body, allow_nan=True, default=str).encode() if written else b""
    request = requests.Request(case.method, url + case.formatted_path, params=case.query or None)
    prepared = request.prepare()
    prepared.prepare_body(content or None, None)
    if case.path in (*BOUND, "/register_miner"):
        headers = ALICE.headers()
    else:
        headers = VALIDATOR.bound_headers(case.method, prepared.path_url, time.time(), content)
    prepared.headers.update({**headers, "Content-Type": "application/json"})
    return prepared
