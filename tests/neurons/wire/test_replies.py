"""Bodies of replies that are malformed, too large, or contain malformed rows of others."""

import json
from typing import Any

import httpx
import pytest

from neurons.wire import outcomes
from neurons.wire.client import ApiClient
from tests.neurons.fake_validator_api import Fault, Request, respond
from tests.neurons.miner.parts import HOTKEY, Key
from tests.neurons.wire.api_calls import COMMITMENT, STATS, every_call

BAD_BODIES = {
    "html": b"<html><body>It works!</body></html>",
    "cut off": b'{"current_block": 1, "pending_rev',
    "NaN": b'{"current_block": NaN, "pending_reveals": []}',
    "Infinity": b'{"current_block": Infinity, "pending_reveals": []}',
    "out of range": b'{"current_block": 1e999, "pending_reveals": []}',
    "wrong type": b'{"current_block": "soon", "pending_reveals": []}',
    "deep": b"[" * 200_000,
    "not text": b"\xff\xfe\x00\x01",
    "huge": b'{"current_block": 1, "x": "' + b"a" * 2**25 + b'"}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_row_10_a_malformed_reply_is_a_protocol_fault(client, fake_api, name):
    fake_api.faults["/pending_reveals"].append(Fault(200, BAD_BODIES[name]))
    with pytest.raises(outcomes.ProtocolFault, match=r"^/pending_reveals answered with"):
        client.pending_reveals()
    assert client.pending_reveals().current_block > 0


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_row_10_a_number_that_is_not_finite_is_a_protocol_fault(client, fake_api, number):
    body = f'{{"epoch": 1, "weights": [{{"uid": 1, "hotkey": "5Other", "weight": {number}}}]}}'
    fake_api.faults["/get_weights"].append(Fault(200, body.encode()))
    with pytest.raises(outcomes.ProtocolFault):
        client.weights(1)


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "br"])
def test_a_compressed_reply_is_refused_before_it_is_read(client, fake_api, encoding):
    fake_api.faults["/pending_reveals"].append(Fault(200, "x", {"Content-Encoding": encoding}))
    with pytest.raises(outcomes.ProtocolFault, match=f"with the encoding '{encoding}'"):
        client.pending_reveals()
    assert {one.headers["accept-encoding"] for one in fake_api.requests} == {"identity"}


FOREIGN_ROWS: dict[str, dict[str, Any]] = {
    "a long address": {"fork_url": "https://example/" + "a" * 1_200_000},
    "not a number": {"tokens_per_sec": float("nan"), "id": float("inf")},
    "wrong types": {"id": "seven", "created_at": [1], "reveal_block": None},
    "nothing": {},
}


@pytest.mark.parametrize("name", FOREIGN_ROWS)
def test_malformed_rows_of_others_do_no_harm(client, fake_api, name):
    client.register("model", "100k")
    client.commit(*COMMITMENT)
    foreign = {"miner_hotkey": "5Other", **FOREIGN_ROWS[name]}
    for route, key in (("/pending_reveals", "pending_reveals"), ("/x", "recent_submissions")):
        answer = fake_api.handle(Request("GET", route.replace("/x", STATS), {}, {}, None))
        content = json.loads(answer.body)
        content[key] = [foreign, *content[key], foreign]
        if key == "recent_submissions":
            content["top_performers"] = [foreign]
        fake_api.faults[route.replace("/x", STATS)].append(Fault(200, json.dumps(content).encode()))
    assert [row.submission_id for row in client.pending_reveals().pending_reveals] == [1]
    queue = client.queue(50)
    assert [row.id for row in queue.rows] == [1]
    assert (len(queue.listed), list(queue.performers)) == (3, [])


def test_a_commitment_is_found_among_thousands(client, fake_api):
    client.register("model", "100k")
    client.commit(*COMMITMENT)
    fake_api.add_foreign(20_000, revealed=False)
    assert [row.submission_id for row in client.pending_reveals().pending_reveals] == [1]


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("/get_current_round", "id"),
        ("/commit_submission", "submission_id"),
        ("/commit_submission", "reveal_block"),
        ("/submit_kernel", "submission_id"),
    ],
)
def test_a_number_that_the_journal_cannot_hold_is_rejected(fake_api, route, field):
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={**respond(fake_api, request).json(), field: 10**40})

    fake_api.registered.add(HOTKEY)
    client = ApiClient("http://127.0.0.1", Key(), transport=httpx.MockTransport(answer))
    with pytest.raises(outcomes.ProtocolFault, match=f"wrong fields: {field}"):
        every_call(client)[route]()
