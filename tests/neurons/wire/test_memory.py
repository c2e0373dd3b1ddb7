"""The memory that a reply takes, measured in a child process that calls a real HTTP server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

import pytest

from neurons.wire.client import LIST_BYTES
from neurons.wire.connection import REPLY_BYTES
from tests.processes import run_python
from tests.servers import Handler, Server, serving

MEBIBYTES = 64
"""Limit on the memory that a reply may take in addition to that of the process at rest."""

CHILD = """
import sys
from neurons.runtime.errors import Held, Retry
from neurons.wire.client import ApiClient
from tests.neurons.miner.parts import Key

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

url, call = sys.argv[1:]
client = ApiClient(url, Key(), reply_seconds=300)
calls = {"weights": lambda: client.weights(1), "queue": lambda: client.queue(9)}
try:
    client.current_round()  # its body is short; the process has loaded everything afterwards
except Retry:
    pass
rest = peak()
try:
    reply = calls.get(call, client.pending_reveals)()
    end = f"{type(reply).__name__} {len(getattr(reply, 'pending_reveals', ()))}"
except (Held, Retry) as fault:
    end = f"{type(fault).__name__} {fault.reason}"
print(round(peak() - rest), end)
"""
ROW = {
    "submission_id": 1234567,
    "miner_hotkey": "5" * 48,
    "commitment_hash": "f" * 16 + "...",
    "reveal_block": 123456789,
    "blocks_remaining": 3,
    "can_reveal": False,
    "created_at": "2026-11-11T11:11:11.111111",
}
HEADS = {
    "weights": b'{"epoch": 1, "weights": [',
    "queue": b'{"total_submissions": 1, "recent_submissions": [',
    "pending": b'{"current_block": 1, "pending_reveals": [',
}


def zipped(size: int, layers: int) -> bytes:
    body = b" " * size
    for _ in range(layers):
        body = gzip.compress(body)
    return body


def filled(call: str, item: bytes) -> bytes:
    """Return a reply as long as its limit allows, in a list of equal items."""
    size = REPLY_BYTES if call == "weights" else LIST_BYTES
    count = (size - len(HEADS[call]) - 2) // (len(item) + 1)
    return HEADS[call] + b",".join([item] * count) + b"]}"


def row(hotkey: str, **values: object) -> bytes:
    return json.dumps({**ROW, "miner_hotkey": hotkey, **values}).encode()


OWN = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
BODIES: dict[str, tuple[Callable[[str], bytes], str]] = {
    "other miners' rows": (lambda call: filled(call, row("5" * 48)), ""),
    "own rows": (lambda call: filled(call, row(OWN)), ""),
    "empty objects": (lambda call: filled(call, b"{}"), ""),
    "empty lists": (lambda call: filled(call, b"[]"), ""),
    "numbers": (lambda call: filled(call, b"0"), ""),
    "wrong rows": (lambda call: filled(call, b'{"a": "bcdefghijk"}'), ""),
    "rows full of lists": (lambda call: filled(call, row("5Other", x=[[]] * 200_000)), ""),
    "a long text": (lambda call: HEADS[call] + b'"' + b"a" * (LIST_BYTES - 99) + b'"]}', ""),
    "a gzip bomb": (lambda _: zipped(2**29, 1), "gzip"),
    "nested gzip": (lambda _: zipped(2**29, 2), "gzip, gzip"),
}


def read_in_child(call: str, body: bytes, encoding: str) -> tuple[int, str]:
    """Return the MiB that a call takes at its peak, and its result."""

    class Reply(Handler):
        def serve(self) -> None:
            if self.path.startswith("/get_current_round"):
                self.send(200, b"{}")
            else:
                self.send(200, body, {"Content-Encoding": encoding} if encoding else None)

    server = Server(Reply)
    with serving(server):
        done = run_python("-c", CHILD, server.url, call)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, _, end = done.stdout.partition(" ")
    return int(peak), end


@pytest.mark.parametrize("call", HEADS)
@pytest.mark.parametrize("name", BODIES)
def test_no_reply_takes_much_memory(name: str, call: str) -> None:
    make, encoding = BODIES[name]
    body = make(call)
    peak, end = read_in_child(call, body, encoding)
    assert peak < MEBIBYTES, f"{len(body)} bytes took {peak} MiB: {end}"
    if (name, call) in (("other miners' rows", "pending"), ("other miners' rows", "queue")):
        assert end.split() == [{"pending": "_Pending", "queue": "Queue"}[call], "0"]
    else:
        assert end.startswith(("ProtocolFault", "TooLarge", "Weights")), end


def test_a_compressed_reply_is_read(tmp_path: object) -> None:
    body = gzip.compress(HEADS["pending"] + row(OWN) + b"]}")
    assert read_in_child("pending", body, "gzip")[1].split() == ["_Pending", "1"]
    cut = read_in_child("pending", body[:-20], "gzip")[1]
    assert "undecodable body (it ends early)" in cut
    other = read_in_child("pending", body, "br")[1]
    assert "answered with the encoding 'br'" in other
