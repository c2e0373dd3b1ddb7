"""Malformed messages raise a WireError and nothing else."""

from __future__ import annotations

import socket
import struct

import pytest

from harness.worker.channel import HEADER_LIMIT, Channel, WireError

HEADERS = [
    "[]",
    '{"tensors": [["a", "int8", [Infinity]]]}',
    '{"tensors": [["a", "int8", [-1, -8]]]}',
    '{"tensors": [["a", "int8", [0, 9223372036854775808]]]}',
    '{"tensors": [["a", "int8", [1048577]]]}',
    '{"tensors": [["a", [], [1]]]}',
    '{"tensors": [["a", "int9", [1]]]}',
    '{"tensors": ' + "[" * 100_000,
    " " * (HEADER_LIMIT + 1),
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_malformed_message_is_refused(header: str) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    Channel(theirs)  # room for the longest header
    with ours, theirs:
        theirs.sendall(struct.pack("<I", len(header)) + header.encode())
        with pytest.raises(WireError):
            channel.receive(1 << 20)
