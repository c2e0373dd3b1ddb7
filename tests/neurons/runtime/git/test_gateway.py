"""The proxy for git's fetches from untrusted addresses, with real sockets."""

import socket
import threading
from collections.abc import Iterator

import pytest

from neurons.runtime.git import gateway as module
from neurons.runtime.git.gateway import Gateway, is_public
from tests.processes import HANG


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *(("140.82.121.3", True), ("2606:50c0:8000::154", True)),
        *(("127.0.0.1", False), ("10.1.2.3", False), ("192.168.0.1", False)),
        *(("172.16.0.1", False), ("169.254.169.254", False), ("100.64.0.1", False)),
        *(("0.0.0.1", False), ("224.0.0.1", False), ("255.255.255.255", False)),
        *(("::1", False), ("::", False), ("fe80::1%eth0", False), ("fd00::1", False)),
        *(("::ffff:127.0.0.1", False), ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False)),
        *(("2002:8c52:7903::", True), ("ff02::1", False)),
    ],
)
def test_is_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server that sends all data back 16 times; it replaces the https port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(module, "HTTPS", port)

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    while data := client.recv(2**16):
                        client.sendall(data * 16)

        threading.Thread(target=serve, daemon=True).start()
        yield port
        listener.shutdown(socket.SHUT_RDWR)


def connect(gateway: Gateway, target: str) -> tuple[bytes, socket.socket]:
    client = socket.create_connection(gateway.server_address, HANG)  # type: ignore[arg-type]
    client.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return client.recv(100).split(b"\r\n")[0], client


def test_data_is_forwarded_up_to_the_limit(echo: int) -> None:
    with Gateway({"localhost"}, 20, public=lambda _: True) as gateway:
        status, client = connect(gateway, f"localhost:{echo}")
        assert b" 200 " in status
        client.sendall(b"a")
        assert client.recv(100) == b"a" * 16
        assert gateway.refusal == ""
        client.sendall(b"b")
        assert client.recv(100) == b""
        assert "exceeds" in gateway.refusal


def test_private_addresses_and_other_hosts_are_rejected(echo: int) -> None:
    cases = {
        f"localhost:{echo}": "not a public address",
        f"[::1]:{echo}": "not a public address",
        f"127.1:{echo}": "not a public address",
        f"2130706433:{echo}": "not a public address",
        "github.com:22": "Nothing is fetched from github.com:22",
    }
    for target, reason in cases.items():
        with Gateway((), 100) as gateway:
            assert b" 403 " in connect(gateway, target)[0], target
            assert reason in gateway.refusal
    with Gateway({"github.com"}, 100, public=lambda _: True) as gateway:
        assert b" 403 " in connect(gateway, f"localhost:{echo}")[0]


def test_one_private_address_among_public_ones_is_rejected(echo, monkeypatch):
    rows = [(2, 1, 6, "", (address, echo)) for address in ("140.82.121.3", "10.0.0.7")]
    real = socket.getaddrinfo

    def answer(host: str, *rest: object, **options: object) -> object:
        named = host == "rebinding.example"
        return rows if named else real(host, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    with Gateway((), 100) as gateway:
        assert b" 403 " in connect(gateway, f"rebinding.example:{echo}")[0]
        assert "10.0.0.7" in gateway.refusal


def test_an_unknown_name_is_not_the_forks_fault(echo: int) -> None:
    with Gateway((), 100) as gateway:
        assert b" 502 " in connect(gateway, f"nowhere.invalid:{echo}")[0]
        assert (gateway.refusal, "nowhere.invalid" in gateway.unreachable) == ("", True)


def test_only_connect_is_served() -> None:
    with Gateway((), 100) as gateway:
        client = socket.create_connection(gateway.server_address, HANG)  # type: ignore[arg-type]
        client.sendall(b"GET http://169.254.169.254/ HTTP/1.1\r\n\r\n")
        assert b" 405 " in client.recv(100)
