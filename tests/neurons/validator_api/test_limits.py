"""Bans, the client's address, the rate limit, and limits on open submissions."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from neurons.validator_api.competition.bans import ban_key
from tests.neurons.live_api import (
    ALICE,
    BLOCKS,
    BOB,
    Clock,
    Hotkey,
    LiveApi,
    commitment,
    revelation,
    serve,
    submission,
)
from tests.postgresql import on_both
from tests.processes import HANG

AWAY = "203.0.113.9"
BANNED = (403, "IP address banned: IP banned for 24.0 more hours")


def fail(api: LiveApi, times: int, client: str) -> None:
    for _ in range(times):
        api.judge("/record_failure", {"ip_address": client})


def own(key: Hotkey) -> str:
    return f"hotkey {key.hotkey}"


def post_from(api: LiveApi, address: str, path: str, body: Any, key: Hotkey) -> httpx.Response:
    headers = key.headers() | {"X-Forwarded-For": address}
    return api.http.post(path, json=body, headers=headers)


def test_the_fifth_failure_bans_the_address_for_a_day(tmp_path: Path) -> None:
    with serve(tmp_path, trusted_proxies=("127.0.0.1",)) as api:
        for key in (ALICE, BOB):
            api.register(key)
        fail(api, 4, AWAY)
        assert post_from(api, AWAY, "/submit_kernel", submission(ALICE), ALICE).status_code == 200
        fail(api, 1, AWAY)
        api.clock.now += 3600 * 12
        for key in (ALICE, BOB):
            reply = post_from(api, AWAY, "/commit_submission", commitment(key), key)
            assert reply.status_code == 403
            assert reply.json()["detail"] == BANNED[1].replace("24.0", "12.0")
        elsewhere = post_from(api, "203.0.113.10", "/commit_submission", commitment(BOB), BOB)
        assert elsewhere.status_code == 200
        api.clock.now += 3600 * 12
        for salt in ("first", "second"):
            body = commitment(ALICE, salt)
            assert post_from(api, AWAY, "/commit_submission", body, ALICE).status_code == 200
            fail(api, 2, AWAY)  # after a ban, counting starts again


def test_the_fifth_failure_bans_an_ipv6_network(tmp_path: Path) -> None:
    with serve(tmp_path, trusted_proxies=("127.0.0.1",)) as api:
        api.register(ALICE)
        body = submission(ALICE)
        assert post_from(api, "2001:db8::1", "/submit_kernel", body, ALICE).status_code == 200
        (row,) = api.queue()["submissions"]
        fail(api, 5, row["ip_address"])
        reply = post_from(api, "2001:db8::2", "/commit_submission", commitment(ALICE), ALICE)
        assert (reply.status_code, reply.json()["detail"]) == BANNED


def test_on_loopback_and_behind_an_unlisted_proxy_a_ban_applies_to_a_hotkey(api: LiveApi) -> None:
    api.register(BOB)
    api.submit(ALICE, 1.0)
    for target, header in enumerate(("X-Forwarded-For", "Forwarded", "X-Real-IP"), 512):
        body = submission(ALICE, target=target)
        headers = ALICE.headers() | {header: AWAY}
        assert api.http.post("/submit_kernel", json=body, headers=headers).status_code == 200
    clients = {row["ip_address"] for row in api.queue()["submissions"]}
    assert clients == {own(ALICE)}
    fail(api, 9, "127.0.0.1")  # not counted
    fail(api, 5, *clients)
    for address in ("", AWAY):
        reply = post_from(api, address, "/commit_submission", commitment(ALICE), ALICE)
        assert (reply.status_code, reply.json()["detail"]) == BANNED
        reply = post_from(api, address, "/commit_submission", commitment(BOB, address), BOB)
        assert reply.status_code == 200


def test_the_last_untrusted_address_of_x_forwarded_for_is_the_client(tmp_path: Path) -> None:
    with serve(tmp_path, trusted_proxies=("127.0.0.1", "10.0.0.0/8")) as api:
        api.register(ALICE)
        forwarded = f"198.51.100.1, {AWAY}, 10.1.2.3"  # the client forged the first
        post_from(api, forwarded, "/submit_kernel", submission(ALICE), ALICE)
        assert api.queue()["submissions"][0]["ip_address"] == AWAY


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("[2001:db8::1:2]:80", "2001:db8::/64"),
        ("2001:db8::/64", "2001:db8::/64"),
        ("::1", "hotkey 5F"),
        (None, "hotkey 5F"),
    ],
)
def test_the_key_of_a_client(address: str | None, key: str) -> None:
    assert ban_key(address, "5F") == key


@pytest.mark.parametrize("refuted", [False, True], ids=["a success", "refuted logits"])
def test_only_a_success_removes_one_failure(api: LiveApi, refuted: bool) -> None:
    fail(api, 4, own(ALICE))
    row = api.submit(ALICE, 1.0)
    if refuted:
        api.judge(f"/record_verification?submission_id={row}&verified=false&reason=differ", {})
    api.mark(row, 1.0)
    fail(api, 1, own(ALICE))
    if not refuted:
        api.judged(ALICE, 2.0, score=0.0)
        api.submit(ALICE, 3.0)  # it is not banned
        fail(api, 1, own(ALICE))
    assert api.post("/commit_submission", commitment(ALICE), ALICE).status_code == 403


def test_a_hash_mismatch_counts_and_other_refusals_do_not(api: LiveApi) -> None:
    row = api.commit(ALICE)
    early = revelation(ALICE, row)
    assert [api.post("/reveal_submission", early, ALICE).status_code for _ in range(6)] == [425] * 6
    assert api.post("/commit_submission", commitment(ALICE), ALICE).status_code == 409
    api.pass_blocks(BLOCKS)
    wrong = revelation(ALICE, row, salt="wrong")
    assert [api.post("/reveal_submission", wrong, ALICE).status_code for _ in range(5)] == [400] * 5
    assert api.refusal("/commit_submission", commitment(ALICE, "new"), ALICE) == BANNED
    api.ok("/reveal_submission", early, ALICE)  # a banned client may reveal
    fail(api, 5, own(BOB))
    assert api.post("/commit_submission", commitment(BOB), BOB).status_code == 404  # unregistered


def test_the_rate_limit_of_a_hotkey(tmp_path: Path) -> None:
    monotonic = Clock()
    with serve(tmp_path, rate_limit=3, monotonic=monotonic) as api:
        for key in (ALICE, BOB):
            api.register(key)
        api.submit(ALICE, 1.0)
        monotonic.now += 20
        api.clock.now -= 3600  # an administrator corrects the clock
        row = api.commit(ALICE)
        paths = ("/register_miner", "/submit_kernel", "/commit_submission", "/reveal_submission")
        for path in paths:
            response = api.post(path, {}, ALICE)
            assert (response.status_code, response.headers["Retry-After"]) == (429, "41")
            assert "Max 3 requests per 60 seconds" in response.json()["detail"]
        api.commit(BOB, salt="bob")
        api.get("/get_submission_stats")
        monotonic.now += 41
        api.pass_blocks(BLOCKS)
        api.ok("/reveal_submission", revelation(ALICE, row), ALICE)


def test_a_request_with_two_lengths_is_refused_and_the_connection_closed(api: LiveApi) -> None:
    """Behind a proxy that reads the other length, the rest would be a client's own request."""
    hidden = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    head = b"POST /register_miner HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"
    with socket.create_connection(("127.0.0.1", urlsplit(api.url).port or 0)) as client:
        client.settimeout(HANG)
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden)
        reply = b"".join(iter(lambda: client.recv(2**16), b""))
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1") == 1, reply


@on_both
def test_a_newer_submission_of_a_target_replaces_the_older_one(api: LiveApi) -> None:
    api.register(BOB)
    api.submit(ALICE, 1.0)
    kept = [api.submit(BOB, 2.0), api.submit(ALICE, 3.0), api.submit(ALICE, 3.0, target=512)]
    assert [row["id"] for row in api.queue()["submissions"]] == kept
    open_ = [api.commit(ALICE, salt=f"{n}") for n in range(3)][-1]
    assert api.pending() == [open_]
    assert len(api.queue()["submissions"]) == 3  # commitments do not replace the revealed row
    api.pass_blocks(BLOCKS)
    newer = "Submission not found: a newer submission replaced it"
    late = revelation(ALICE, open_ - 1, salt="1")
    assert api.refusal("/reveal_submission", late, ALICE) == (404, newer)
    api.reveal(ALICE, open_, salt="2")
    assert [row["id"] for row in api.queue()["submissions"]] == [kept[0], kept[2], open_]


def test_one_hotkey_cannot_fill_the_queue(api: LiveApi) -> None:
    api.register(BOB)
    honest = api.submit(BOB, 1.0)
    figures = {
        str(n): {"tokens_per_sec": 1.0, "vram_mb": 2.0, "x" * 32: 1.0} for n in range(513, 545)
    }
    for target in range(513, 552):
        api.submit(ALICE, 1.0, target=target, benchmarks=figures)
    page = api.queue(limit=4)
    rest = api.queue(after=page["next_after"])
    assert page["submissions"][0]["id"] == honest
    assert (len(page["submissions"] + rest["submissions"]), rest["next_after"]) == (11, None)
    assert all(len(row["benchmarks"]) <= 1 for row in rest["submissions"])


@on_both
def test_one_of_many_commitments_with_the_same_hash_succeeds(api: LiveApi) -> None:
    api.register(BOB)
    keys = [ALICE, BOB] * 12
    bodies = [
        {**commitment(key, salt=str(n // 6)), "target_sequence_length": 512 + n}
        for n, key in enumerate(keys)
    ]
    with ThreadPoolExecutor(len(keys)) as pool:
        sent = zip(bodies, keys, strict=True)
        replies = list(pool.map(lambda one: api.post("/commit_submission", *one), sent))
    statuses = sorted(reply.status_code for reply in replies)
    assert statuses == [200] * 4 + [409] * 20  # four salts, so four hashes
    rows = [reply.json()["submission_id"] for reply in replies if reply.status_code == 200]
    assert sorted(api.pending()) == sorted(rows)
