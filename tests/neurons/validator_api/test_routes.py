"""Each call of the API and its statuses, against a real server with real signatures."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from neurons.wire.protocol import RevealRequest, bound_commitment
from neurons.wire.signed_request import signed_headers
from tests.neurons.live_api import (
    ALICE,
    BLOCKS,
    BOB,
    COMMIT,
    FORK,
    JSON,
    VALIDATOR,
    Clock,
    Hotkey,
    LiveApi,
    bound,
    commitment,
    revelation,
    serve,
    submission,
)
from tests.neurons.wire.api_calls import SIGNED
from tests.postgresql import on_both

VALIDATORS_ONLY = (
    *("/mark_validated", "/record_verification", "/record_failure", "/lift_ban"),
    *("/withdraw_submission", "/finalize_round/1", "/create_round"),
)


def test_each_write_needs_headers_and_a_body_that_no_error_repeats(api: LiveApi) -> None:
    cases = {
        "Missing Hotkey or Signature headers": {"Hotkey": ALICE.hotkey},
        "Invalid signature": {**ALICE.headers(), "Hotkey": BOB.hotkey},
        "Invalid signature format. Expected hex string": {**ALICE.headers(), "Signature": "abc"},
        # Alice's key in the format of another network
        "Authentication error: the Hotkey header is not an ss58 address": {
            **ALICE.headers(),
            "Hotkey": "15oF4uVJwmo4TdGW7VfQxNLavjCXviqxT9S1MgbjMNHr6Sp5",
        },
    }
    for path in SIGNED:
        for text, headers in cases.items():
            response = api.http.post(path, json={}, headers=headers)
            assert (response.status_code, response.json()) == (401, {"detail": text})
        status, problems = api.refusal(path, {"commitment_salt": ["secret-salt"]}, ALICE)
        assert status == 422
        assert {"type", "loc", "msg"} == set(problems[0])
        assert "secret-salt" not in json.dumps(problems)


def test_only_validators_write_verdicts(api: LiveApi) -> None:
    for path in VALIDATORS_ONLY:
        assert api.refused_verdict(path, {}, ALICE) == (403, "Only validators may do this")
        static = api.refusal(path, {}, VALIDATOR)  # without Timestamp and Nonce
        assert static[0] == 401
        assert static[1].startswith("Invalid signature: a validator signs each request")


@on_both
def test_a_validators_request_is_accepted_once_and_unchanged(tmp_path, database_url):
    wall, path = Clock(), "/mark_validated"
    with serve(tmp_path, database_url=database_url, wall_clock=wall) as api:

        def send(content: bytes, headers: dict[str, str], to: str = path) -> tuple[int, Any]:
            reply = api.http.post(to, content=content, headers=headers | JSON)
            return reply.status_code, reply.json().get("detail")

        api.register(ALICE)
        row = api.submit(ALICE, 1000.0)
        good = json.dumps({"submission_id": row, "score": 0.5}).encode()
        headers = signed_headers(VALIDATOR, "POST", path, good, wall.now)
        wrong = (401, "Invalid signature")
        assert send(good.replace(b"0.5", b"9.5"), headers) == wrong
        assert send(good, headers, "/record_failure") == wrong
        assert (send(good, headers, f"{path}?x=1"), send(good, headers)[0]) == (wrong, 200)
        wall.now += 59
        assert send(good, headers) == (401, "Nonce was used before")
        wall.now += 141
        new = signed_headers(VALIDATOR, "POST", path, good, wall.now)
        assert send(good, new)[0] == 200  # deletes the first nonce
        assert send(good, headers)[1].startswith("Timestamp is more than 60 s")


def test_a_figure_out_of_range_is_422(api: LiveApi) -> None:
    for field, figure in (
        *(("tokens_per_sec", figure) for figure in ("NaN", "1e999", "-1", "1.7e308")),
        ("vram_mb", "NaN"),
        ("target_sequence_length", "511"),
    ):
        text = json.dumps({**submission(ALICE), field: "FIGURE"}).replace('"FIGURE"', figure)
        response = api.http.post("/submit_kernel", content=text, headers=ALICE.headers() | JSON)
        assert (response.status_code, response.json()["detail"][0]["loc"]) == (422, ["body", field])


def test_a_large_body_is_413(api: LiveApi) -> None:
    def endless() -> Any:
        for _ in range(3):
            yield b" " * 2**15

    for body in (b" " * 2**17, endless()):
        response = api.http.post("/submit_kernel", content=body, headers=ALICE.headers())
        assert response.status_code == 413
        assert "16384 bytes" in response.json()["detail"]


@on_both
def test_register(api: LiveApi) -> None:
    bob = {"hotkey": BOB.hotkey, "model_name": "Qwen", "league": "100k", "uid": 1}
    assert api.register(BOB) == {"status": "registered", **bob}
    assert api.register(BOB)["status"] == "already_registered"
    other = api.register(ALICE, league="1M")  # the public server answers 500 here
    assert (other["status"], other["uid"]) == ("registered", 0)
    body = {"hotkey": ALICE.hotkey, "model_name": "Qwen", "league": "150k"}
    status, text = api.refusal("/register_miner", body, ALICE)
    assert (status, text.startswith("Invalid league. Must be one of: 100k, 200k")) == (400, True)
    assert api.refusal("/register_miner", body, BOB) == (403, "Hotkey mismatch")


def test_submit(api: LiveApi) -> None:
    assert api.refusal("/submit_kernel", submission(BOB), BOB) == (404, "Miner not registered")
    assert api.refusal("/submit_kernel", submission(BOB), ALICE) == (403, "Hotkey mismatch")
    figures = {"512": {"tokens_per_sec": 5.0, "vram_mb": 1.0}}
    reply = api.ok("/submit_kernel", submission(ALICE, 7.0, benchmarks=figures), ALICE)
    assert (reply["submission_id"], reply["created_at"]) == (1, "2026-02-02T02:40:00")
    row = api.get("/get_submission_stats")["recent_submissions"][0]
    assert row["benchmarks"] == figures
    assert (row["id"], row["fork_url"], row["commit_hash"]) == (1, FORK, COMMIT)
    assert (row["tokens_per_sec"], row["validated"]) == (7.0, False)


def test_the_body_signature_binds_the_claim(api: LiveApi) -> None:
    for change in ({"tokens_per_sec": 2000.0}, {"fork_url": "https://host/x"}, {"repo_hash": "r"}):
        body = {**submission(ALICE), **change}
        assert api.refusal("/submit_kernel", body, ALICE) == (401, "Invalid signature")


def test_the_reference_miners_signatures_are_accepted(api: LiveApi) -> None:
    figures = {length: {"tokens_per_sec": 1.0} for length in (512, 1024, 100_000)}
    numeric = f"{FORK}{COMMIT}1000.0{json.dumps(figures, sort_keys=True)}"
    body = submission(ALICE, benchmarks={str(n): f for n, f in figures.items()})
    api.ok("/submit_kernel", {**body, "signature": ALICE.sign(numeric)}, ALICE)
    both = {**body, "repo_hash": "feed", "signature": ALICE.sign(f"{numeric}feed")}
    api.ok("/submit_kernel", both, ALICE)
    for repo_hash in (None, "feed"):
        signature = ALICE.sign(f"{FORK}{COMMIT}1000.0{repo_hash or ''}")
        bare = {**submission(ALICE), "repo_hash": repo_hash, "signature": signature}
        api.ok("/submit_kernel", bare, ALICE)


def test_commit(api: LiveApi) -> None:
    body = commitment(ALICE)
    unknown = (404, "Miner not registered")
    assert api.refusal("/commit_submission", commitment(BOB), BOB) == unknown
    assert api.refusal("/commit_submission", commitment(BOB), ALICE) == (403, "Hotkey mismatch")
    for change in ({"commitment_hash": "0" * 64}, {"version": 2}):
        refused = api.refusal("/commit_submission", body | change, ALICE)
        assert refused == (401, "Invalid signature")
    reply = api.ok("/commit_submission", body, ALICE)
    block = api.get("/pending_reveals")["current_block"]
    assert reply["commitment_hash"] == body["commitment_hash"]
    assert reply["reveal_block"] == block + BLOCKS
    assert reply["estimated_reveal_time"] == "2026-02-02T02:40:36"
    known = "Commitment hash already exists. Use a different salt."
    assert api.refusal("/commit_submission", body, ALICE) == (409, known)


def test_a_commitment_is_pending_and_not_in_the_queue_before_its_reveal(api: LiveApi) -> None:
    row = api.commit(ALICE)
    assert api.get("/get_submission_stats")["recent_submissions"] == []
    early = api.refused_verdict("/mark_validated", {"submission_id": row, "score": 0.0})
    assert early == (409, "Submission not revealed yet")
    assert api.queue()["submissions"] == []
    digest = commitment(ALICE)["commitment_hash"]
    for blocks, remaining in ((0, BLOCKS), (BLOCKS - 1, 1), (5, 0)):
        api.pass_blocks(blocks)
        (pending,) = api.get("/pending_reveals")["pending_reveals"]
        assert pending["commitment_hash"] == digest[:16] + "..."
        assert (pending["blocks_remaining"], pending["can_reveal"]) == (remaining, remaining == 0)
    api.reveal(ALICE, row)
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
    message = "Submission revealed successfully. Awaiting validation."
    names = {"miner_hotkey": ALICE.hotkey, "fork_url": FORK, "commit_hash": COMMIT}
    revealed = {"submission_id": row, "is_revealed": True, "message": message, **names}
    assert api.ok(path, body, ALICE) == revealed
    assert api.refusal(path, body, ALICE) == (409, "Submission already revealed")
    assert api.pending() == []


def test_mark_validated(api: LiveApi) -> None:
    row = api.submit(ALICE, 1000.0)
    path = "/mark_validated"
    assert api.refused_verdict(path, {"score": 1.0}) == (400, "submission_id required")
    unknown = {"submission_id": 9, "score": 1.0}
    assert api.refused_verdict(path, unknown) == (404, "Submission not found")
    assert api.refused_verdict(path, {"submission_id": row, "score": -1})[0] == 422
    reply = api.judge(path, {"submission_id": row, "score": 1.25})
    assert reply == {"status": "ok", "submission_id": row, "score": 1.25}
    stats = api.get("/get_submission_stats")
    assert stats["recent_submissions"] == []
    (best,) = stats["top_performers"]
    assert (best["id"], best["rank"], best["score"], best["validated"]) == (row, 1, 1.25, True)
    assert best["weighted_score"] == 500.0


def test_the_first_of_two_validators_decides(tmp_path: Path) -> None:
    keys, scores = (VALIDATOR, BOB), (0.0, 1.25)
    with serve(tmp_path, validator_hotkeys=[key.hotkey for key in keys]) as api:
        api.register(ALICE)
        row = api.submit(ALICE, 1000.0)

        def mark(key: Hotkey, score: float) -> httpx.Response:
            return api.verdict("/mark_validated", {"submission_id": row, "score": score}, key)

        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(mark, keys, scores))
        assert sorted(reply.status_code for reply in replies) == [200, 400]
        first = [reply.status_code for reply in replies].index(200)
        judged = f"Submission already judged by {keys[first].hotkey}"
        assert replies[1 - first].json() == {"detail": judged}
        (shown,) = api.get("/get_submission_stats")["top_performers"]
        assert shown["score"] == scores[first]
        assert record(api, keys[1 - first], submission_id=row, verified=True).status_code == 400
        assert mark(keys[first], 0.5).status_code == 200  # it judges again


def record(api: LiveApi, key: Hotkey, **params: Any) -> httpx.Response:
    """Send the outcome of a logit verification."""
    target = str(httpx.URL("/record_verification", params=params))
    return api.http.post(target, headers=signed_headers(key, "POST", target, b"", time.time()))


@on_both
def test_record_verification(api: LiveApi) -> None:
    row = api.submit(ALICE, 1000.0)
    unknown = record(api, VALIDATOR, submission_id=9, verified=True)
    assert unknown.json() == {"detail": "Submission not found"}
    infinite = record(api, VALIDATOR, submission_id=row, verified=True, max_abs_diff="nan")
    assert infinite.status_code == 422
    figures = {"cosine_similarity": 0.5, "max_abs_diff": 0.2, "reason": "differs"}
    reply = record(api, VALIDATOR, submission_id=row, verified=False, **figures)
    assert reply.json() == {"status": "recorded", "verified": False}
    api.mark(row, 1.0)
    assert api.get("/get_submission_stats")["top_performers"][0]["rank"] is None
    assert api.http.get("/verification_stats", params={"round_id": 10**30}).status_code == 422
    stats = api.get("/verification_stats")
    assert (stats["verified_passed"], stats["verified_failed"]) == (0, 1)
    assert (stats["pass_rate"], stats["avg_cosine_similarity"]) == (0.0, 0.5)


@on_both
def test_stats_list_the_newest_first_and_hide_addresses(api: LiveApi) -> None:
    api.register(BOB)
    first = api.submit(BOB, 10.0)
    api.clock.now += 60 * 5
    second = api.submit(ALICE, 30.0)
    rate = api.get("/get_submission_rate", window_minutes=4)
    assert (rate["recent_submissions"], rate["submissions_per_minute"]) == (1, 0.25)
    assert api.get("/get_submission_rate")["recent_submissions"] == 2
    stats = api.get("/get_submission_stats")
    rows = stats["recent_submissions"]
    assert [row["id"] for row in rows] == [second, first]
    assert [row["ip_address"] for row in rows] == [None, None]
    speeds = {f"{name}_tokens_per_sec": n for name, n in (("avg", 20), ("max", 30), ("min", 10))}
    assert stats["stats"] == {**speeds, "total_submissions": 2}
    assert len(api.get("/get_submission_stats", limit=1)["recent_submissions"]) == 1


@on_both
def test_identical_submissions_of_a_round_are_one(api: LiveApi) -> None:
    first = api.ok("/submit_kernel", submission(ALICE), ALICE)
    api.clock.now += 90
    assert api.ok("/submit_kernel", submission(ALICE), ALICE) == first
    api.mark(first["submission_id"], 0.0)
    assert api.submit(ALICE, 1000.0) == first["submission_id"]  # no second measurement
    assert api.submit(ALICE, 1000.5) != first["submission_id"]
    api.judge("/finalize_round/1", {})
    assert api.submit(ALICE, 1000.0) != first["submission_id"]


def test_version_2_binds_all_of_a_submission(api: LiveApi) -> None:
    body = submission(ALICE) | {"version": 2}
    signed = bound(ALICE, "/submit_kernel", body)
    refused = (401, "Invalid signature")
    assert api.refusal("/submit_kernel", body, ALICE) == refused
    for change in ({"target_sequence_length": 10**6}, {"version": None}):
        assert api.refusal("/submit_kernel", signed | change, ALICE) == refused
    api.ok("/submit_kernel", signed, ALICE)


def test_a_commitment_of_version_2_binds_commit_and_claim(api: LiveApi) -> None:
    claim = revelation(ALICE, 1)
    digest = bound_commitment("salt", 100_000, RevealRequest(**claim))
    body = commitment(ALICE) | {"commitment_hash": digest}
    committed = bound(ALICE, "/commit_submission", body)
    row = api.ok("/commit_submission", committed, ALICE)["submission_id"]
    api.pass_blocks(BLOCKS)
    path = "/reveal_submission"
    honest = revelation(ALICE, row)
    mismatch = (400, "Commitment verification failed. Hash mismatch.")
    for change in ({"commit_hash": "b" * 40}, {"tokens_per_sec": 9e9}, {"fork_url": f"{FORK}2"}):
        other = bound(ALICE, path, honest | change)
        assert api.refusal(path, other, ALICE) == mismatch
    signed = bound(ALICE, path, honest)
    assert api.refusal(path, signed | {"vram_mb": 1.0}, ALICE) == (401, "Invalid signature")
    api.ok(path, signed, ALICE)


def test_a_commitment_expires(api: LiveApi) -> None:
    row = api.commit(ALICE)
    api.pass_blocks(BLOCKS + 301)
    assert api.pending() == []
    status, text = api.refusal("/reveal_submission", revelation(ALICE, row), ALICE)
    assert status == 404
    assert text.startswith("Submission not found: the commitment expired at block ")


@on_both
def test_pending_reveals_come_in_pages_and_by_hotkey(api: LiveApi) -> None:
    api.register(BOB)
    ours = api.commit(ALICE)
    theirs = api.commit(BOB, "b")
    assert api.pending(limit=1) == [theirs]
    assert api.pending(before=theirs) == api.pending(hotkey=ALICE.hotkey) == [ours]
    assert api.http.get("/pending_reveals", params={"limit": 5000}).status_code == 422
    for foreign in ("\0", "x" * 1000):  # PostgreSQL's texts cannot contain NUL
        assert api.http.get("/pending_reveals", params={"hotkey": foreign}).status_code == 422


def test_a_commitment_to_a_docker_image_is_refused(api: LiveApi) -> None:
    image = "registry/image:1"
    row = api.commit(ALICE, fork=image)
    api.pass_blocks(BLOCKS)
    stolen = revelation(ALICE, row, fork="https://host/anothers") | {"docker_image": image}
    status, text = api.refusal("/reveal_submission", stolen, ALICE)
    assert (status, text.startswith("This server accepts only forks")) == (400, True)
