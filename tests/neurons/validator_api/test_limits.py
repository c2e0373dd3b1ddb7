"""Bans, the rate limit, and whose address counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neurons.validator_api.auth import RateLimiter
from tests.neurons.live_api import (
    ALICE,
    BLOCKS,
    BOB,
    VALIDATOR,
    LiveApi,
    commitment,
    revelation,
    serve,
)

HOME = "127.0.0.1"


def fail(api: LiveApi, times: int) -> None:
    for _ in range(times):
        api.ok("/record_failure", {"ip_address": HOME}, VALIDATOR)


def test_the_fifth_failure_bans_the_address_for_a_day(api: LiveApi) -> None:
    api.register(BOB)
    fail(api, 4)
    api.submit(ALICE, 1.0)
    fail(api, 1)
    api.clock.now += 3600 * 12
    banned = (403, "IP address banned: IP banned for 12.0 more hours")
    for key in (ALICE, BOB):
        assert api.refusal("/commit_submission", commitment(key), key) == banned
    api.clock.now += 3600 * 12
    api.commit(ALICE)
    fail(api, 4)  # a served ban starts again from nothing
    api.commit(ALICE, salt="another")


def test_a_success_clears_the_failures_and_a_zero_does_not(api: LiveApi) -> None:
    good, bad = api.submit(ALICE, 1.0), api.submit(ALICE, 2.0)
    fail(api, 4)
    api.mark(good, 1.0)
    fail(api, 4)
    api.mark(bad, 0.0)
    api.submit(ALICE, 3.0)
    fail(api, 1)
    assert api.post("/commit_submission", commitment(ALICE), ALICE).status_code == 403


def test_a_hash_mismatch_counts_and_other_refusals_do_not(api: LiveApi) -> None:
    row = api.commit(ALICE)
    early = revelation(ALICE, row)
    assert [api.post("/reveal_submission", early, ALICE).status_code for _ in range(6)] == [425] * 6
    again = commitment(ALICE)
    assert api.post("/commit_submission", again, ALICE).status_code == 409
    api.pass_blocks(BLOCKS)
    wrong = revelation(ALICE, row, salt="wrong")
    assert [api.post("/reveal_submission", wrong, ALICE).status_code for _ in range(4)] == [400] * 4
    api.commit(ALICE, salt="still welcome")
    assert api.post("/reveal_submission", wrong, ALICE).status_code == 400
    assert api.post("/commit_submission", commitment(ALICE, "new"), ALICE).status_code == 403
    api.ok("/reveal_submission", early, ALICE)  # a ban shuts out what is new, not what is due


def test_unregistered_is_said_before_banned(api: LiveApi) -> None:
    fail(api, 5)
    assert api.post("/commit_submission", commitment(BOB), BOB).status_code == 404


def test_a_forwarded_address_is_not_believed(api: LiveApi) -> None:
    headers = {**ALICE.headers(), "X-Forwarded-For": "203.0.113.9"}
    body = commitment(ALICE)
    assert api.http.post("/commit_submission", json=body, headers=headers).status_code == 200
    api.pass_blocks(BLOCKS)
    api.ok("/reveal_submission", revelation(ALICE, 1), ALICE)
    queue = api.http.get("/get_submission_stats", headers=VALIDATOR.headers()).json()
    assert queue["recent_submissions"][0]["ip_address"] == HOME


def test_the_rate_limit_is_a_hotkeys_own_and_tells_when_to_return(tmp_path: Path) -> None:
    with serve(tmp_path, rate_limit=2, limit_loopback=True) as api:
        for key in (ALICE, BOB):
            api.register(key)
        api.submit(ALICE, 1.0)
        api.clock.now += 20
        api.commit(ALICE)
        response = api.post("/commit_submission", {}, ALICE)
        assert response.status_code == 429
        assert response.headers["Retry-After"] == "41"
        assert "Max 2 requests per 60 seconds" in response.json()["detail"]
        api.commit(BOB, salt="bob")
        api.get("/get_submission_stats")
        api.clock.now += 41
        api.submit(ALICE, 1.0)


def test_loopback_clients_are_not_limited(tmp_path: Path) -> None:
    with serve(tmp_path, rate_limit=1) as api:
        api.register(ALICE)
        for speed in (1.0, 2.0, 3.0):
            api.submit(ALICE, speed)


@pytest.mark.parametrize("limit", [0, 3])
def test_the_limiter_forgets_what_the_window_left(limit: int) -> None:
    now = 0.0
    limiter = RateLimiter(limit, lambda: now)
    waits: list[Any] = []
    for now in range(0, 600, 10):
        waits.append(limiter.wait(f"hotkey {now}"))
        assert len(limiter._calls) <= 7
    assert set(waits) == {0.0}
