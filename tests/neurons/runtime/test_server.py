"""A server's address."""

import socket

import pytest

from neurons.runtime.errors import ConfigError
from neurons.runtime.server import listen

NAMES = ("HOST", "PORT")


def test_accepted_connections_have_tcp_nodelay() -> None:
    with (
        listen("127.0.0.1", 0, NAMES) as place,
        socket.create_connection(place.getsockname()),
        place.accept()[0] as served,
    ):
        assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_is_reported_with_its_setting() -> None:
    with listen("127.0.0.1", 0, NAMES) as place:
        port = place.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port, NAMES)
    assert str(caught.value) == (
        f"HOST=127.0.0.1, PORT={port}: cannot bind 127.0.0.1:{port} (Address already in use). "
        "Set another PORT, or stop the program that uses it."
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-host.invalid"])
def test_an_address_of_another_machine_is_rejected(host: str) -> None:
    with pytest.raises(ConfigError, match="Set HOST to an address of this machine"):
        listen(host, 0, NAMES)
