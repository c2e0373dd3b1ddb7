"""Months of a daemon in scaled time: `python -m tests.faults.months.month_child FOLDER CYCLES`.

Every round ends with its verdict, and waits take no time. After a fifth of the cycles and at the
end, the process prints its memory, open descriptors and registered secrets as a JSON line.
"""

import gc
import json
import os
import sys
from functools import partial
from pathlib import Path

import httpx

from neurons.miner.daemon import run_forever
from neurons.runtime import observe
from neurons.runtime.process import Stopped
from neurons.wire.client import ApiClient
from tests.neurons.fake_validator_api import FakeValidatorApi, Fault, respond
from tests.neurons.miner.parts import Key, Waits, make_context

EVERY_TENTH = (Fault(503, "busy"), Fault(stored=True), Fault(429, "slow", {"Retry-After": "9"}))


def usage() -> dict[str, int]:
    """Return this process's memory in KiB, its open descriptors and its registered secrets."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_kib": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "secrets": len(observe._secrets),
    }


def main(folder: Path, cycles: int) -> None:
    """Run cycles; one in ten meets a fault of the API."""
    server, done = FakeValidatorApi(), 0

    def next_round(seconds: float) -> None:
        nonlocal done
        if seconds != context.settings.optimization_interval:
            return
        done += 1
        if done in (cycles // 5, cycles):
            sys.stdout.write(json.dumps(usage()) + "\n")
        if done == cycles:
            raise Stopped("enough")
        server.round_id += 1
        for history in (server.rows, server.weights, server.performers, server.requests):
            history.clear()  # the fake runs in this process, and its memory must not count
        if done % 10 == 0:
            server.faults["/commit_submission"].append(EVERY_TENTH[done // 10 % 3])

    url = "http://127.0.0.1:1"
    transport = httpx.MockTransport(partial(respond, server))
    client = ApiClient(url, Key(), transport=transport)
    context = make_context(folder, url, client=client, waiter=Waits(next_round))
    for part, name in (
        *((context.fork, one) for one in ("pushed", "verified")),
        *((context.measure, one) for one in ("calls", "checks")),
        (context.waiter, "seconds"),
    ):
        setattr(part, name, _Forgetful())
    observe.configure(file=folder / "logs" / "miner.log")
    run_forever(context)


class _Forgetful(list[object]):
    """The record of a fake, which keeps only its newest entries."""

    def append(self, item: object) -> None:
        super().append(item)
        del self[:-10]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
