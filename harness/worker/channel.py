"""The channel between the referee and its subject, which is another process.

A message is a JSON header and raw tensors. Nothing is unpickled, because code under test writes the
subject's messages. The two processes share stdout, stderr and the channel, but no memory.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.measuring.errors import without_result
from harness.sample import Kind
from harness.worker.failures import WorkerError

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
_LONGEST = 1 << 40  # elements of one dimension

_SPARE = 64 << 20
"""Bytes that a reply may have in addition to eight times the largest tensor sent."""

_GRACE = 2.0
"""Seconds for the end of a subject that has closed its channel."""

_KINDS: tuple[Kind, ...] = ("gate", "import", "crash", "out_of_memory")


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


class SubjectProxy:
    """The code under test, in the process `pid` at the other end of `channel`.

    Its replies are untrusted input. `proof.py` measures the speed of untrusted code by the
    referee's clock.
    """

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel, self._pid = channel, pid
        self._sent = 0  # bytes of the largest tensor so far, which limits the size of replies

    def ask(
        self, op: str, tensors: Mapping[str, Tensor] | None = None, **fields: Any
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Request an operation; return the reply: JSON values and tensors on the CPU.

        Raises a WorkerError if the subject failed, ended or does not keep to the protocol.
        """
        for tensor in (tensors or {}).values():
            self._sent = max(self._sent, tensor.numel() * tensor.element_size())
        try:
            self._channel.send({"op": op, **fields}, tensors)
            body, contents = self._channel.receive(8 * self._sent + _SPARE)
        except WireError as error:
            if error.gone:
                raise self._ended() from None
            raise WorkerError(f"the worker's answer is malformed: {error}", "protocol") from None
        except OSError:
            raise self._ended() from None
        failure = body.get("failure")
        if isinstance(failure, dict):
            kind: Kind = next((k for k in _KINDS if k == failure.get("kind")), "protocol")
            raise WorkerError(str(failure.get("reason", ""))[:2000], kind)
        return body, contents

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        self.ask("put", tensors)

    def draw(self, name: str, shape: Sequence[int], seed: int) -> None:
        self._sent = max(self._sent, 4 * math.prod(shape))
        self.ask("draw", name=name, shape=list(shape), seed=seed)

    def fetch(self, names: Sequence[str], rows: Sequence[int] | None = None) -> dict[str, Tensor]:
        return self.ask("fetch", names=names, rows=rows)[1]

    def operate(self, *, initial: bool = False, final: bool = False) -> dict[str, Tensor]:
        return self.ask("operate", initial=initial, final=final)[1]

    def build(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        return self.ask("build", weights)[1]

    def weights(self) -> dict[str, Tensor]:
        return self.ask("weights")[1]

    def forward(self) -> dict[str, Tensor]:
        return self.ask("forward")[1]

    def gradients(self) -> dict[str, Tensor]:
        return self.ask("gradients")[1]

    def tampered(self) -> dict[str, Any]:
        return self.ask("tampered")[0]

    def end(self) -> None:
        """End the process; its memory, on the GPU too, is free afterwards."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _ended(self) -> WorkerError:
        deadline = time.monotonic() + _GRACE
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        while not pid and time.monotonic() < deadline:
            time.sleep(0.01)
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            self.end()
            return WorkerError("the code under test closed the referee's channel", "protocol")
        self._pid = 0
        return WorkerError(*without_result(os.waitstatus_to_exitcode(status)))
