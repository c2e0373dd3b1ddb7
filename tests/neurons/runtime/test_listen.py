"""A server's address: one that can be had is, one that cannot names the setting to change."""

from __future__ import annotations

import socket

import pytest

from neurons.runtime.errors import ConfigError
from neurons.runtime.listen import listen

NAMES = ("HOST", "PORT")


def test_a_free_port_is_listened_on() -> None:
    with listen("127.0.0.1", 0, NAMES) as place:
        socket.create_connection(place.getsockname()).close()


def test_a_reply_in_two_parts_does_not_wait_for_its_client() -> None:
    with (
        listen("127.0.0.1", 0, NAMES) as place,
        socket.create_connection(place.getsockname()),
        place.accept()[0] as served,
    ):
        assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with listen("127.0.0.1", 0, NAMES) as place:
        port = place.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port, NAMES)
    assert str(caught.value) == (
        f"HOST=127.0.0.1, PORT={port}: nobody can be served there (Address already in use). "
        "Set another PORT, or stop what has it."
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="Set HOST to an address of this machine"):
        listen(host, 0, NAMES)
