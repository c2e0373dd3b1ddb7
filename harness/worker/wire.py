"""Messages between the referee and its subject: a JSON header and raw tensors, over a socket.

Nothing is unpickled, because code under test writes the subject's messages.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

HEADER_LIMIT = 1 << 20
"""Bytes of a header; tensors are limited by the receiver."""

_BUFFER = 4 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
    )
}


_UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError),
    OverflowError,  # Infinity for a number
    RecursionError,  # lists within lists
)
_LONGEST = 1 << 40


class WireError(Exception):
    """The received bytes are not a valid message; if `gone` is true, the other side has closed."""

    def __init__(self, reason: str, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class Channel:
    """One end of the socket; it is closed with the process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER)

    def send(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a header without the key `tensors`, and tensors; an OSError if it is closed."""
        host = {name: t.detach().cpu().contiguous() for name, t in (tensors or {}).items()}
        shapes = [
            (name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in host.items()
        ]
        text = json.dumps({**header, "tensors": shapes}, allow_nan=False).encode()
        self._end.sendall(struct.pack("<I", len(text)) + text)
        for tensor in host.values():
            if tensor.numel():
                self._end.sendall(_bytes_of(tensor))

    def receive(self, limit: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the next header and its tensors, on the CPU, of at most `limit` bytes.

        Raises a WireError if the message is malformed or too long, or the other side has closed.
        """
        size = bytearray(4)
        self._fill(memoryview(size))
        (length,) = struct.unpack("<I", size)
        if length > HEADER_LIMIT:
            raise WireError(f"a header of {length} bytes")
        text = bytearray(length)
        self._fill(memoryview(text))
        try:
            header = json.loads(text)
            described = [
                (str(name), _DTYPES[dtype], tuple(int(n) for n in shape))
                for name, dtype, shape in header.pop("tensors")
            ]
        except _UNREADABLE as error:
            raise WireError("a header that cannot be read") from error
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape in described:
            elements = 1
            for n in shape:
                elements *= n
            limit -= elements * dtype.itemsize
            if limit < 0 or not all(0 <= n < _LONGEST for n in shape):
                raise WireError(f"a tensor {name[:40]!r} of shape {shape}")
            tensors[name] = torch.empty(shape, dtype=dtype)
            if elements:
                self._fill(_bytes_of(tensors[name]))
        return header, tensors

    def _fill(self, into: memoryview) -> None:
        while into:
            try:
                count = self._end.recv_into(into)
            except ConnectionError as error:
                raise WireError("the other side is gone", gone=True) from error
            if not count:
                raise WireError("the other side is gone", gone=True)
            into = into[count:]
