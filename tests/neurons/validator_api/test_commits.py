"""Commitments: who may commit, which one replaces another, and what a commit reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from neurons.validator_api.competition.submissions import OPEN_A_HOTKEY
from tests.neurons.live_api import ALICE, BOB, LiveApi, commitment


def commit(api: LiveApi, salt: str, target: int) -> int:
    body = {**commitment(ALICE, salt), "target_sequence_length": target}
    return int(api.ok("/commit_submission", body, ALICE)["submission_id"])


def test_a_hotkey_has_one_commitment_of_a_target_and_a_bounded_number_in_all(api):
    revealed = [api.submit(ALICE, 1.0, target=512 + n) for n in (7, 8)]
    first = [commit(api, f"first {n}", target=512 + n) for n in range(4)]
    second = [commit(api, f"second {n}", target=512 + n) for n in range(4)]
    assert api.pending() == second[::-1]
    assert not set(first) & set(api.pending())
    commit(api, "seven", target=519)  # leaves the revealed row of this target in the queue
    assert [row["id"] for row in api.queue()["submissions"]] == revealed
    many = [commit(api, f"many {n}", target=600 + n) for n in range(OPEN_A_HOTKEY)]
    assert api.pending() == many[::-1]
    assert api.queue()["submissions"] == []


def test_one_of_many_identical_commitments_is_taken(api: LiveApi) -> None:
    api.register(BOB)
    keys = [ALICE, BOB] * 12
    bodies = [
        {**commitment(key, salt=str(n // 6)), "target_sequence_length": 512 + n}
        for n, key in enumerate(keys)
    ]
    with ThreadPoolExecutor(len(keys)) as crowd:
        sent = zip(bodies, keys, strict=True)
        replies = list(crowd.map(lambda one: api.post("/commit_submission", *one), sent))
    statuses = sorted(reply.status_code for reply in replies)
    assert statuses == [200] * 4 + [409] * 20  # four salts, whoever came first
    rows = [reply.json()["submission_id"] for reply in replies if reply.status_code == 200]
    assert sorted(api.pending()) == sorted(rows)
