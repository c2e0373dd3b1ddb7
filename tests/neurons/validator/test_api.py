"""The validator's client against the live API and against faulty servers."""

import json
import threading
from typing import Any

import httpx
import pytest

from neurons.runtime.errors import ConfigError
from neurons.validator import api as module
from neurons.validator.api import ApiFault, ValidatorApi
from tests.neurons.live_api import ALICE, VALIDATOR, LiveApi

FORK = {"fork_url": "https://host/fork", "commit_hash": "a" * 40}
CLAIM = {"target_sequence_length": 512, "tokens_per_sec": 1.0, "created_at": "2026-01-01T00:00:02"}
ROW = {"id": 1, "miner_hotkey": "5Grw", **FORK, **CLAIM}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)


def answering(
    *answers: httpx.Response | Exception, **options: Any
) -> tuple[ValidatorApi, list[httpx.Request]]:
    """Return a client that gets `answers`, the last one repeatedly, and the list of requests."""
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        reply = answers[min(len(sent), len(answers)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply

    transport = httpx.MockTransport(answer)
    return ValidatorApi("https://api.example", VALIDATOR, transport=transport, **options), sent


def queue_of(*rows: Any) -> httpx.Response:
    return httpx.Response(200, content=json.dumps({"submissions": list(rows)}))


def test_a_rejected_hotkey_is_a_configuration_error(api: LiveApi) -> None:
    client = ValidatorApi(api.url, ALICE)
    with pytest.raises(ConfigError, match="VALIDATOR_HOTKEYS") as caught:
        client.mark(1, 1.0)
    assert ALICE.hotkey in str(caught.value)


def test_unrevealed_judged_and_malformed_rows_are_skipped() -> None:
    commitment = {**ROW, "id": 2, "fork_url": None, "commit_hash": None, "tokens_per_sec": 0.0}
    others = [{**ROW, "id": 3, "is_revealed": False}, {**ROW, "id": 4, "validated": True}]
    malformed = [{"id": "x"}, None]
    older = {**ROW, "id": 7, "created_at": "2025"}
    client, _ = answering(queue_of(commitment, *others, *malformed, ROW, older))
    assert [row.id for row in client.queue()] == [7, 1]


def test_every_page_of_the_queue_is_read() -> None:
    def page(number: int, following: int | None) -> httpx.Response:
        rows = {"submissions": [{**ROW, "id": number}], "next_after": following}
        return httpx.Response(200, content=json.dumps(rows))

    # 300 hotkeys with 10 open submissions each fill 30 pages of 100 rows; here each page has one
    pages = 30
    client, sent = answering(*(page(n, n if n < pages else None) for n in range(1, pages + 1)))
    assert [row.id for row in client.queue()] == [*range(1, pages + 1)]
    assert [request.url.params["after"] for request in sent] == [str(n) for n in range(pages)]
    client, sent = answering(page(1, 1))  # a faulty server repeats its page; the client stops
    assert len(client.queue()) == 2
    assert len(sent) == 2


def test_temporary_faults_are_retried() -> None:
    broken = (httpx.Response(503), httpx.ConnectError("refused"))
    client, sent = answering(*broken, queue_of(ROW))
    assert len(client.queue()) == 1
    assert len(sent) == 3
    client, sent = answering(httpx.Response(500, text="oops"))
    with pytest.raises(ApiFault, match="500"):
        client.queue()
    assert len(sent) == module.ATTEMPTS


def test_new_rounds_and_calls_after_a_stop_are_not_retried() -> None:
    client, sent = answering(httpx.ReadError("the reply was lost"))
    with pytest.raises(ApiFault):
        client.create_round(48)
    stop = threading.Event()
    stop.set()
    stopped, sent_after = answering(httpx.ConnectError("refused"), stop=stop)
    with pytest.raises(ApiFault):
        stopped.queue()
    assert len(sent) == len(sent_after) == 1


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (httpx.Response(200, text="{}"), "wrong fields: submissions"),
        (httpx.Response(200, content=b" " * (2**22 + 1)), "more than 4194304 bytes"),
        (
            httpx.Response(302, headers={"Location": "https://elsewhere.example"}),
            "redirected to https://elsewhere",
        ),
        (httpx.Response(400, json={"detail": "submission_id required"}), "submission_id required"),
    ],
)
def test_unusable_replies_are_api_faults_without_a_retry(reply: httpx.Response, words: str) -> None:
    client, sent = answering(reply)
    with pytest.raises(ApiFault, match=words):
        client.queue()
    assert [request.url.host for request in sent] == ["api.example"]
