"""The memory that a reply takes, measured in a child process that calls a real HTTP server."""

import json
from itertools import product

import pytest

from neurons.wire.client import LIST_BYTES
from neurons.wire.connection import REPLY_BYTES
from tests.processes import run_python
from tests.servers import Handler, Server, serving

MEBIBYTES = 160
"""Limit on the memory that a reply may take in addition to that of the process at rest."""

CHILD = """
import json, sys
from neurons.runtime.errors import Held, Retry
from neurons.wire.client import ApiClient
from tests.neurons.miner.parts import Key

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

url, calls = sys.argv[1], json.loads(sys.argv[2])
ends = []
for number, call in enumerate(calls):
    client = ApiClient(f"{url}/{number}", Key(), reply_seconds=300)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    rest = peak()
    try:
        reply = client.weights(1) if call == "weights" else getattr(client, call)(
            *([9] if call == "queue" else [])
        )
        end = f"{type(reply).__name__} {len(getattr(reply, 'pending_reveals', ()))}"
    except (Held, Retry) as fault:
        end = f"{type(fault).__name__} {fault.reason}"
    ends.append([round(peak() - rest), end])
print(json.dumps(ends))
"""
BLOCKS = {"reveal_block": 123456789, "blocks_remaining": 3, "can_reveal": False}
ROW = {"submission_id": 1234567, "commitment_hash": "f" * 16 + "...", **BLOCKS}
ROW["created_at"] = "2026-11-11T11:11:11.111111"
HEADS = {
    "weights": b'{"epoch": 1, "weights": [',
    "queue": b'{"total_submissions": 1, "recent_submissions": [',
    "pending_reveals": b'{"current_block": 1, "pending_reveals": [',
}


def row(hotkey: str, **values: object) -> bytes:
    return json.dumps({**ROW, "miner_hotkey": hotkey, **values}).encode()


OWN = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
ITEMS = {
    "other miners' rows": row("5" * 48),
    "own rows": row(OWN),
    "empty objects": b"{}",
    "empty lists": b"[]",
    "numbers": b"0",
    "wrong rows": b'{"a": "bcdefghijk"}',
    "rows full of lists": row("5Other", x=[[]] * 20_000),
    "a long text": b'"' + b"a" * (LIST_BYTES - 99) + b'"',
}
CASES = list(product(ITEMS, HEADS))


def filled(call: str, item: bytes) -> bytes:
    """Return a reply as long as its limit allows, in a list of equal items."""
    size = REPLY_BYTES if call == "weights" else LIST_BYTES
    count = max(1, (size - len(HEADS[call]) - 2) // (len(item) + 1))
    return HEADS[call] + b",".join([item] * count) + b"]}"


@pytest.fixture(scope="module")
def ends() -> list[tuple[int, str]]:
    """The MiB that each case takes at its peak, and its result."""

    class Reply(Handler):
        def serve(self) -> None:
            name, call = CASES[int(self.path.split("/")[1])]
            self.send(200, filled(call, ITEMS[name]))

    with serving(server := Server(Reply)):
        done = run_python("-c", CHILD, server.url, json.dumps([call for _, call in CASES]))
    assert done.returncode == 0, done.stderr[-2000:]
    return [tuple(end) for end in json.loads(done.stdout)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(case) for case in CASES])
def test_no_reply_takes_much_memory(number: int, ends: list[tuple[int, str]]) -> None:
    name, call = CASES[number]
    peak, end = ends[number]
    assert peak < MEBIBYTES, f"it took {peak} MiB: {end}"
    if name == "other miners' rows" and call != "weights":
        assert end.split() == [{"pending_reveals": "_Pending", "queue": "Queue"}[call], "0"]
    else:
        assert end.startswith(("ProtocolFault", "TooLarge", "Weights", "_Pending")), end
