"""schemathesis draws requests from the API's OpenAPI document; none may be answered with 500.

Each is signed as its route requires, so that its values reach the database.
`QUASAR_FUZZ_EXAMPLES=1000` sends more requests to each route.
"""

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

from neurons.wire.signed_request import signed_headers
from tests import postgresql
from tests.neurons.live_api import ALICE, BOUND, FORK, VALIDATOR, LiveApi, bound, serve
from tests.processes import HANG

EXAMPLES = int(os.environ.get("QUASAR_FUZZ_EXAMPLES", "5"))
KNOWN = {
    "hotkey": ALICE.hotkey,
    "miner_hotkey": ALICE.hotkey,
    "league": "1M",
    "fork_url": FORK,
    "commit_hash": "a" * 40,
    "commitment_hash": "b" * 64,
}
"""Values that random draws would not find, without which most requests are refused early."""


@pytest.fixture
def api(tmp_path: Path, server: postgresql.Server) -> Iterator[LiveApi]:
    """An API on PostgreSQL, the stricter database, with a submission (1) and a commitment (2)."""
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
    succeeded = {path for path, status in statuses if status == 200}
    assert {"/health", "/get_current_round", "/register_miner", "/submit_kernel"} <= succeeded
    assert not any(status == 401 for _, status in statuses)  # every signature was accepted


def signed(case: Case, url: str) -> requests.PreparedRequest:
    """Return the request as the miner or the validator would sign it."""
    body: Any = case.body
    if isinstance(body, dict):
        known = {name: value for name, value in KNOWN.items() if name in body}
        body = {**body, **known}
        if isinstance(body.get("submission_id"), int):
            body["submission_id"] %= 4  # most of these rows exist
        if case.path in BOUND:
            body = {**body, "version": 2}
            with suppress(ValidationError):
                body = bound(ALICE, case.path, body)
    written = case.method == "POST" and case.operation.body
    content = json.dumps(body, allow_nan=True, default=str).encode() if written else b""
    request = requests.Request(case.method, url + case.formatted_path, params=case.query or None)
    prepared = request.prepare()
    prepared.prepare_body(content or None, None)
    if case.path in (*BOUND, "/register_miner"):
        headers = ALICE.headers()
    else:
        headers = signed_headers(VALIDATOR, case.method, prepared.path_url, content, time.time())
    prepared.headers.update({**headers, "Content-Type": "application/json"})
    return prepared
