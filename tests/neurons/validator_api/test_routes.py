"""Every call of the wire and each of its statuses, against a real server with real signatures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.neurons.http.api_calls import SIGNED
from tests.neurons.live_api import (
    ALICE,
    BLOCKS,
    BOB,
    COMMIT,
    FORK,
    VALIDATOR,
    LiveApi,
    commitment,
    revelation,
    serve,
    submission,
)

VALIDATORS_ONLY = (
    "/mark_validated",
    "/record_verification",
    "/record_failure",
    "/finalize_round/1",
    "/create_round",
)


def test_health(api: LiveApi) -> None:
    assert api.get("/health") == {"status": "ok"}


@pytest.mark.parametrize("path", SIGNED + VALIDATORS_ONLY)
def test_each_write_needs_the_headers(api: LiveApi, path: str) -> None:
    cases = {
        "Missing Hotkey or Signature headers": {"Hotkey": ALICE.hotkey},
        "Invalid signature format. Expected hex string": {**ALICE.headers(), "Signature": "0xzz"},
        "Invalid signature": {**ALICE.headers(), "Hotkey": BOB.hotkey},
    }
    for text, headers in cases.items():
        response = api.http.post(path, json={}, headers=headers)
        assert (response.status_code, response.json()) == (401, {"detail": text})
    response = api.http.post(path, json={}, headers={**ALICE.headers(), "Hotkey": "nobody"})
    assert response.status_code == 401
    assert response.json()["detail"].startswith("Authentication error: ")


@pytest.mark.parametrize("path", VALIDATORS_ONLY)
def test_only_validators_write_verdicts(api: LiveApi, path: str) -> None:
    assert api.refusal(path, {}, ALICE) == (403, "Only validators may do this")


@pytest.mark.parametrize("path", SIGNED)
def test_a_malformed_body_is_422_and_is_not_repeated(api: LiveApi, path: str) -> None:
    status, problems = api.refusal(path, {"commitment_salt": ["secret-salt"]}, ALICE)
    assert status == 422
    assert {"type", "loc", "msg"} == set(problems[0])
    assert "secret-salt" not in json.dumps(problems)


@pytest.mark.parametrize("figure", ["NaN", "Infinity", "1e999", "-1"])
@pytest.mark.parametrize("field", ["tokens_per_sec", "vram_mb"])
def test_a_number_that_is_none_is_422(api: LiveApi, figure: str, field: str) -> None:
    text = json.dumps({**submission(ALICE), field: "FIGURE"}).replace('"FIGURE"', figure)
    headers = {**ALICE.headers(), "Content-Type": "application/json"}
    response = api.http.post("/submit_kernel", content=text, headers=headers)
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", field]
    assert api.get("/get_submission_stats")["recent_submissions"] == []


def test_unknown_routes_and_methods_answer_in_json(api: LiveApi) -> None:
    assert api.refusal("/nothing", {}) == (404, "Not Found")
    assert api.refusal("/health", {}) == (405, "Method Not Allowed")


def test_a_large_body_is_413(api: LiveApi) -> None:
    def endless() -> Any:
        for _ in range(3):
            yield b" " * 2**15

    for body in (b" " * 2**17, endless()):
        response = api.http.post("/submit_kernel", content=body, headers=ALICE.headers())
        assert response.status_code == 413
        assert "65536 bytes" in response.json()["detail"]


def test_an_unexpected_fault_is_a_json_500(tmp_path: Path) -> None:
    def broken() -> float:
        raise OSError("no clock")

    # captured, as structlog's own way of showing a traceback takes seconds
    with capture_logs() as logs, serve(tmp_path, clock=broken) as api:
        response = api.http.get("/get_current_round")
        assert (response.status_code, response.json()) == (500, {"detail": "Internal server error"})
    assert "request failed" in [row["event"] for row in logs]


def test_register(api: LiveApi) -> None:
    assert api.register(BOB) == {
        "status": "registered",
        "hotkey": BOB.hotkey,
        "model_name": "Qwen",
        "league": "100k",
        "uid": 1,
    }
    assert api.register(BOB)["status"] == "already_registered"
    other = api.register(ALICE, league="1M")  # the public server answers 500 here
    assert (other["status"], other["uid"]) == ("registered", 0)


def test_register_refuses(api: LiveApi) -> None:
    body = {"hotkey": ALICE.hotkey, "model_name": "Qwen", "league": "150k"}
    status, text = api.refusal("/register_miner", body, ALICE)
    assert status == 400
    assert text.startswith("Invalid league. Must be one of: 100k, 200k")
    assert api.refusal("/register_miner", body, BOB) == (403, "Hotkey mismatch")


def test_submit(api: LiveApi) -> None:
    assert api.refusal("/submit_kernel", submission(BOB), BOB) == (404, "Miner not registered")
    assert api.refusal("/submit_kernel", submission(BOB), ALICE) == (403, "Hotkey mismatch")
    figures = {"512": {"tokens_per_sec": 5.0, "vram_mb": 1.0}}
    reply = api.ok("/submit_kernel", submission(ALICE, 7.0, benchmarks=figures), ALICE)
    assert reply["submission_id"] == 1
    assert reply["created_at"] == "2026-02-02T02:40:00"
    row = api.get("/get_submission_stats")["recent_submissions"][0]
    assert row["benchmarks"] == figures
    assert (row["id"], row["fork_url"], row["commit_hash"]) == (1, FORK, COMMIT)
    assert (row["tokens_per_sec"], row["validated"]) == (7.0, False)


def test_the_body_signature_binds_the_claim(api: LiveApi) -> None:
    for change in ({"tokens_per_sec": 2000.0}, {"fork_url": "https://host/x"}, {"repo_hash": "r"}):
        body = {**submission(ALICE), **change}
        assert api.refusal("/submit_kernel", body, ALICE) == (401, "Invalid signature")
    wrong = {**commitment(ALICE), "signature": ALICE.sign("another text")}
    assert api.refusal("/commit_submission", wrong, ALICE) == (401, "Invalid signature")


def test_the_reference_miners_signatures_are_accepted(api: LiveApi) -> None:
    figures = {length: {"tokens_per_sec": 1.0} for length in (512, 1024, 100_000)}
    numeric = f"{FORK}{COMMIT}1000.0{json.dumps(figures, sort_keys=True)}"
    body = submission(ALICE, benchmarks={str(n): f for n, f in figures.items()})
    api.ok("/submit_kernel", {**body, "signature": ALICE.sign(numeric)}, ALICE)
    bare = {**submission(ALICE), "signature": ALICE.sign(f"{FORK}{COMMIT}1000.0")}
    api.ok("/submit_kernel", bare, ALICE)


def test_commit(api: LiveApi) -> None:
    body = commitment(ALICE)
    unknown = (404, "Miner not registered")
    assert api.refusal("/commit_submission", commitment(BOB), BOB) == unknown
    assert api.refusal("/commit_submission", commitment(BOB), ALICE) == (403, "Hotkey mismatch")
    reply = api.ok("/commit_submission", body, ALICE)
    block = api.get("/pending_reveals")["current_block"]
    assert reply["commitment_hash"] == body["commitment_hash"]
    assert reply["reveal_block"] == block + BLOCKS
    assert reply["estimated_reveal_time"] == "2026-02-02T02:40:36"
    taken = "Commitment hash already exists. Use a different salt."
    assert api.refusal("/commit_submission", body, ALICE) == (409, taken)


def test_pending_reveals_count_the_blocks_down(api: LiveApi) -> None:
    api.commit(ALICE)
    digest = commitment(ALICE)["commitment_hash"]
    (row,) = api.get("/pending_reveals")["pending_reveals"]
    assert row["commitment_hash"] == digest[:16] + "..."
    assert (row["blocks_remaining"], row["can_reveal"]) == (BLOCKS, False)
    api.pass_blocks(BLOCKS - 1)
    (row,) = api.get("/pending_reveals")["pending_reveals"]
    assert (row["blocks_remaining"], row["can_reveal"]) == (1, False)
    api.pass_blocks(5)
    (row,) = api.get("/pending_reveals")["pending_reveals"]
    assert (row["blocks_remaining"], row["can_reveal"]) == (0, True)


def test_a_commitment_is_not_in_the_queue_before_its_reveal(api: LiveApi) -> None:
    row = api.commit(ALICE)
    assert api.get("/get_submission_stats")["recent_submissions"] == []
    mark = {"submission_id": row, "score": 0.0}
    assert api.refusal("/mark_validated", mark, VALIDATOR) == (409, "Submission not revealed yet")
    api.pass_blocks(BLOCKS)
    api.ok("/reveal_submission", revelation(ALICE, row), ALICE)
    (queued,) = api.get("/get_submission_stats")["recent_submissions"]
    assert (queued["id"], queued["is_revealed"]) == (row, True)


def test_reveal(api: LiveApi) -> None:
    row = api.commit(ALICE)
    body = revelation(ALICE, row)
    path = "/reveal_submission"
    assert api.refusal(path, revelation(BOB, row), ALICE) == (403, "Hotkey mismatch")
    unsigned = {**body, "signature": "00"}
    assert api.refusal(path, unsigned, ALICE) == (401, "Invalid signature")
    assert api.refusal(path, revelation(ALICE, 99), ALICE) == (404, "Submission not found")
    assert api.refusal(path, revelation(BOB, row), BOB) == (404, "Submission not found")
    early = f"Cannot reveal yet. Wait {BLOCKS} blocks (~0 minutes)"
    assert api.refusal(path, body, ALICE) == (425, early)
    api.pass_blocks(BLOCKS)
    mismatch = "Commitment verification failed. Hash mismatch."
    assert api.refusal(path, revelation(ALICE, row, salt="other"), ALICE) == (400, mismatch)
    slash = revelation(ALICE, row, fork=f"{FORK}/")
    assert api.refusal(path, slash, ALICE) == (400, mismatch)
    assert api.ok(path, body, ALICE) == {
        "submission_id": row,
        "miner_hotkey": ALICE.hotkey,
        "fork_url": FORK,
        "commit_hash": COMMIT,
        "is_revealed": True,
        "message": "Submission revealed successfully. Awaiting validation.",
    }
    assert api.refusal(path, body, ALICE) == (409, "Submission already revealed")
    assert api.get("/pending_reveals")["pending_reveals"] == []


def test_blocks_are_as_long_as_the_settings_say(tmp_path: Path) -> None:
    with serve(tmp_path, blocks_until_reveal=1, block_time_seconds=1) as api:
        api.register(ALICE)
        row = api.commit(ALICE)
        assert api.post("/reveal_submission", revelation(ALICE, row), ALICE).status_code == 425
        api.clock.now += 1
        assert api.post("/reveal_submission", revelation(ALICE, row), ALICE).status_code == 200


def test_mark_validated(api: LiveApi) -> None:
    row = api.submit(ALICE, 1000.0)
    path = "/mark_validated"
    assert api.refusal(path, {"score": 1.0}, VALIDATOR) == (400, "submission_id required")
    unknown = {"submission_id": 9, "score": 1.0}
    assert api.refusal(path, unknown, VALIDATOR) == (404, "Submission not found")
    assert api.post(path, {"submission_id": row, "score": -1}, VALIDATOR).status_code == 422
    reply = api.ok(path, {"submission_id": row, "score": 1.25}, VALIDATOR)
    assert reply == {"status": "ok", "submission_id": row, "score": 1.25}
    stats = api.get("/get_submission_stats")
    assert stats["recent_submissions"] == []
    (best,) = stats["top_performers"]
    assert (best["id"], best["rank"], best["score"], best["validated"]) == (row, 1, 1.25, True)
    assert best["weighted_score"] == 500.0


def test_record_verification(api: LiveApi) -> None:
    row = api.submit(ALICE, 1000.0)

    def record(**params: Any) -> Any:
        headers = VALIDATOR.headers()
        return api.http.post("/record_verification", params=params, headers=headers)

    assert record(submission_id=9, verified=True).json() == {"detail": "Submission not found"}
    assert record(submission_id=row, verified=True, max_abs_diff="nan").status_code == 422
    figures = {"cosine_similarity": 0.5, "max_abs_diff": 0.2, "reason": "differs"}
    reply = record(submission_id=row, verified=False, **figures)
    assert reply.json() == {"status": "recorded", "verified": False}
    api.mark(row, 1.0)
    assert api.get("/get_submission_stats")["top_performers"][0]["rank"] is None
    assert api.http.get("/verification_stats", params={"round_id": 10**30}).status_code == 422
    stats = api.get("/verification_stats")
    assert (stats["verified_passed"], stats["verified_failed"]) == (0, 1)
    assert (stats["pass_rate"], stats["avg_cosine_similarity"]) == (0.0, 0.5)


def test_submission_rate(api: LiveApi) -> None:
    api.submit(ALICE, 1.0)
    api.clock.now += 60 * 5
    api.submit(ALICE, 1.0)
    rate = api.get("/get_submission_rate", window_minutes=4)
    assert (rate["recent_submissions"], rate["submissions_per_minute"]) == (1, 0.25)
    assert api.get("/get_submission_rate")["recent_submissions"] == 2


def test_stats_list_the_newest_first_and_hide_addresses(api: LiveApi) -> None:
    first = api.submit(ALICE, 10.0)
    api.clock.now += 1
    second = api.submit(ALICE, 30.0)
    stats = api.get("/get_submission_stats")
    rows = stats["recent_submissions"]
    assert [row["id"] for row in rows] == [second, first]
    assert [row["ip_address"] for row in rows] == [None, None]
    assert stats["stats"] == {
        "avg_tokens_per_sec": 20.0,
        "max_tokens_per_sec": 30.0,
        "min_tokens_per_sec": 10.0,
        "total_submissions": 2,
    }
    assert len(api.get("/get_submission_stats", limit=1)["recent_submissions"]) == 1
    seen = api.http.get("/get_submission_stats", headers=VALIDATOR.headers()).json()
    assert seen["recent_submissions"][0]["ip_address"] == "127.0.0.1"


def test_state_survives_a_restart(tmp_path: Path) -> None:
    with serve(tmp_path) as api:
        api.register(ALICE)
        row = api.commit(ALICE)
    with serve(tmp_path) as api:
        api.pass_blocks(BLOCKS)
        api.ok("/reveal_submission", revelation(ALICE, row), ALICE)
