"""Many and slow clients: one answer for a crowd, an end for who does not send or does not read."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn
from sqlalchemy import event
from sqlalchemy.engine import Engine
from starlette.types import Message, Receive, Scope, Send

from neurons.runtime import patience
from neurons.validator_api.access.cache import AnswerCache
from tests.neurons.live_api import ALICE, LiveApi, serve
from tests.processes import HANG, wait_for


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """What is sent to any database while the test runs."""
    seen: list[str] = []

    def note(_: object, __: object, statement: str, *___: object) -> None:
        seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield seen
    event.remove(Engine, "before_cursor_execute", note)


def test_a_crowd_costs_one_answer(tmp_path: Path, statements: list[str]) -> None:
    with serve(tmp_path, cache_seconds=60.0) as api:
        api.register(ALICE)
        api.submit(ALICE, 5.0)
        for path in ("/", "/get_submission_stats?limit=3", "/get_current_round"):
            statements.clear()
            with ThreadPoolExecutor(8) as crowd:
                replies = list(crowd.map(lambda _: api.http.get(path), range(8)))  # noqa: B023
            first = len(statements)
            assert {reply.status_code for reply in replies} == {200}
            assert len({reply.text for reply in replies}) == 1
            api.http.get(path)
            assert len(statements) == first > 0
        # Another question is another answer, and one's own commitments are never old.
        assert api.get("/get_submission_stats", limit=1)["total_submissions"] == 1
        for number in (1, 2):
            api.commit(ALICE, salt=str(number))
            (row,) = api.get("/pending_reveals", hotkey=ALICE.hotkey)["pending_reveals"]
            assert row["submission_id"] == 1 + number


def test_only_a_good_answer_is_kept(tmp_path: Path) -> None:
    with serve(tmp_path, cache_seconds=60.0) as api:
        api.register(ALICE)
        assert api.http.get("/submissions/1").status_code == 404
        assert api.submit(ALICE, 5.0) == 1
        assert api.http.get("/submissions/1").status_code == 200


def test_an_answer_is_kept_for_its_time(tmp_path: Path) -> None:
    with serve(tmp_path, cache_seconds=0.2) as api:
        api.register(ALICE)
        assert api.get("/get_submission_stats")["total_submissions"] == 0
        api.submit(ALICE, 5.0)
        wait_for(lambda: api.get("/get_submission_stats")["total_submissions"])


def test_who_takes_no_answer_keeps_nobody_else_from_it() -> None:
    scope = {"type": "http", "method": "GET", "path": "/get_weights", "query_string": b""}

    async def route(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def take_nothing(_: Message) -> None:
        await asyncio.Event().wait()

    async def ask() -> list[Message]:
        cache, taken = AnswerCache(route, 60.0), list[Message]()

        async def take(message: Message) -> None:
            taken.append(message)

        first = asyncio.create_task(cache(scope, receive, take_nothing))
        await asyncio.sleep(0)
        await asyncio.wait_for(cache(scope, receive, take), HANG)
        assert not first.done()
        first.cancel()
        return taken

    assert [message.get("body") for message in asyncio.run(ask())] == [None, b"{}"]


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveApi]:
    """An API with limits for a client, which a test may shorten."""
    monkeypatch.setattr(patience, "REQUEST_SECONDS", HANG)
    monkeypatch.setattr(patience, "ANSWER_SECONDS", 0.4)
    config = uvicorn.Config

    def configured(app: object, **options: object) -> uvicorn.Config:
        return config(app, http=patience.ImpatientProtocol, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("tests.neurons.live_api.uvicorn.Config", configured)
    with serve(tmp_path) as api:
        yield api


HEAD = b"GET /health HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /submit_kernel HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"


@pytest.mark.parametrize("start", [b"", b"GE", HEAD, POST])
@pytest.mark.parametrize("is_first", [True, False])
def test_who_does_not_finish_a_request_is_cut_off(
    impatient: LiveApi, start: bytes, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(impatient.url.rpartition(":")[2])
    if is_first:
        monkeypatch.setattr(patience, "REQUEST_SECONDS", 0.4)
    with socket.create_connection(("127.0.0.1", port), timeout=HANG) as client:
        if not is_first:
            client.sendall(HEAD + b"\r\n")
            assert client.recv(4096)
            start = start or b"G"  # without a byte it would be idle, which uvicorn sees to
            monkeypatch.setattr(patience, "REQUEST_SECONDS", 0.4)
        client.sendall(start)
        with suppress(ConnectionError):
            while client.recv(4096):  # fails after HANG
                pass


def test_who_does_not_read_the_answers_is_cut_off(impatient: LiveApi) -> None:
    address = ("127.0.0.1", int(impatient.url.rpartition(":")[2]))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address)
        for _ in range(400):  # 10 MB of answers, more than any system's buffers hold
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n")
        looking = select.poll()
        looking.register(client, select.POLLHUP)
        assert looking.poll(1000 * HANG), f"the connection stands after {HANG} s"


def test_a_crowd_that_asks_nothing_keeps_nobody_out(
    impatient: LiveApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "MOST_CONNECTIONS", 8)
    address = ("127.0.0.1", int(impatient.url.rpartition(":")[2]))
    with ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(address, HANG)) for _ in range(40)]
        for _ in range(3):
            assert httpx.get(f"{impatient.url}/health", timeout=HANG).json() == {"status": "ok"}
        for early in crowd[:30]:
            with pytest.raises(ConnectionError):
                early.recv(1)
        crowd[-1].sendall(HEAD + b"\r\n")
        assert crowd[-1].recv(4096).startswith(b"HTTP/1.1 200")


def test_a_head_has_an_end(impatient: LiveApi) -> None:
    headers = {"X-Long": "x" * (patience.HEAD_BYTES - 4000)}
    assert impatient.http.get("/health", headers=headers).status_code == 200
    address = ("127.0.0.1", int(impatient.url.rpartition(":")[2]))
    with socket.create_connection(address, HANG) as client, pytest.raises(ConnectionError):
        client.sendall(HEAD + b"X-Long: " + b"x" * 2**26)


def test_who_sends_in_pieces_but_in_time_is_answered(
    impatient: LiveApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(impatient.url.rpartition(":")[2])
    for limit in (0.4, 4.0, 40.0):  # until this machine sends each request in time
        monkeypatch.setattr(patience, "REQUEST_SECONDS", limit)
        with socket.create_connection(("127.0.0.1", port), timeout=HANG) as client:
            slowest = 0.0
            with suppress(ConnectionError):
                for _ in range(3):  # one connection, longer than one request may take
                    begun = time.monotonic()
                    answer = b""
                    for piece in (HEAD[:5], HEAD[5:], b"\r\n"):
                        client.sendall(piece)
                        time.sleep(0.15 * limit)
                    while b'{"status":"ok"}' not in answer:  # head and body come apart
                        part = client.recv(4096)
                        if not part:
                            break
                        answer += part
                    slowest = max(slowest, time.monotonic() - begun)
        if slowest < 0.9 * limit:
            break
    assert b'{"status":"ok"}' in answer, f"cut off after {answer!r}"
