"""A server's address, and its limits on connections and request heads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from neurons.runtime import server as server_module
from neurons.runtime.errors import ConfigError
from neurons.runtime.server import HEAD_BYTES, Server, listen
from tests.processes import HANG, wait_for

NAMES = ("HOST", "PORT")
Address = tuple[str, int]


async def app(_: Any, __: Any, send: Any) -> None:
    """Answer every request with `here`."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """The address of a server that serves seven connections at a time."""
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 8)
    ready = threading.Event()
    server = Server(app, lambda *_: ready.set())
    server.config.lifespan = "off"
    place = listen("127.0.0.1", 0, NAMES)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    thread.start()
    assert ready.wait(HANG)
    yield place.getsockname()
    server.should_exit = True
    thread.join(HANG)
    assert not thread.is_alive()


def ask(address: Address, **headers: str) -> int:
    """Return the status of a request on a connection of its own."""
    host, port = address
    return httpx.get(f"http://{host}:{port}/", headers=headers, timeout=HANG).status_code


@pytest.mark.parametrize(
    "start", [b"", b"GE", b"GET / HTTP/1.1\r\nHost: a\r\n", b"POST / HTTP/1.1\r\nHost: a\r\n"]
)
def test_unfinished_requests_are_bounded_and_leave_the_server_alive(
    address: Address, start: bytes
) -> None:
    with ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(address, HANG)) for _ in range(6)]
        for client in crowd:
            client.sendall(start)
        assert ask(address) == 200
        more = [stack.enter_context(socket.create_connection(address, HANG)) for _ in range(6)]
        for client in more:
            client.sendall(start)
        wait_for(lambda: ask(address) == 503)
    wait_for(lambda: ask(address) == 200)


def test_a_long_head_is_refused(address: Address) -> None:
    assert ask(address, x="x" * (HEAD_BYTES - 4000)) == 200
    with socket.create_connection(address, HANG) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * (HEAD_BYTES + 1))
        assert client.recv(4096).startswith(b"HTTP/1.1 400")


def test_a_request_in_pieces_is_answered(address: Address) -> None:
    with socket.create_connection(address, HANG) as client:
        for byte in b"GET / HTTP/1.1\r\nHost: a\r\n\r\n":
            client.sendall(bytes([byte]))
        assert client.recv(4096).startswith(b"HTTP/1.1 200")


def test_accepted_connections_have_tcp_nodelay() -> None:
    with (
        listen("127.0.0.1", 0, NAMES) as place,
        socket.create_connection(place.getsockname()),
        place.accept()[0] as served,
    ):
        assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_taken_port_is_named_with_its_setting() -> None:
    with listen("127.0.0.1", 0, NAMES) as place:
        port = place.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port, NAMES)
    assert str(caught.value) == (
        f"HOST=127.0.0.1, PORT={port}: cannot bind 127.0.0.1:{port} (Address already in use). "
        "Set another PORT, or stop the program that uses it."
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="Set HOST to an address of this machine"):
        listen(host, 0, NAMES)
