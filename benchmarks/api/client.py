"""A client that costs little beside the server: prepared requests over kept connections."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

CONNECTIONS = 32
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Prepared:
    """A request as bytes; `name` is what the caller knows it by."""

    name: str
    content: bytes


@dataclass
class Answers:
    """What came of the requests: seconds of the good ones, and who they were."""

    seconds: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    failed: int = 0
    elapsed: float = 0.0

    def percentile(self, share: float) -> float:
        """Return the share's quantile of the latencies, in milliseconds."""
        cuts = statistics.quantiles(self.seconds, n=100, method="inclusive")
        return 1000 * cuts[round(share * 100) - 1]


def get(path: str) -> Prepared:
    """Return a GET request."""
    return Prepared(path, f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())


def post(name: str, path: str, headers: Mapping[str, str], body: object) -> Prepared:
    """Return a POST request with a JSON body."""
    content = json.dumps(body).encode()
    told = {
        "Host": "bench",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        **headers,
    }
    lines = "".join(f"{key}: {value}\r\n" for key, value in told.items())
    return Prepared(name, f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + content)


async def send(
    port: int, requests: Sequence[Prepared], rate: float | None, seconds: float
) -> Answers:
    """Send each request once, as far as the time allows.

    Args:
        seconds: nothing is sent later. With a rate, what was due and is not sent has failed.
        rate: requests/s. A latency then counts from the moment at which its request was due, so
            that a server that falls behind is not spared. None: each connection sends when its
            last answer has come.
    """
    found, start = Answers(), time.perf_counter()
    end = start + seconds
    due = deque((start + (n / rate if rate else 0.0), one) for n, one in enumerate(requests))

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while due and (now := time.perf_counter()) < end:
            at, request = due.popleft()
            if at >= end:
                found.failed += 1
                continue
            if at > now:
                await asyncio.sleep(at - now)
            begun = at if rate else now
            try:
                writer.write(request.content)
                status = await asyncio.wait_for(_answer(reader), TIMEOUT_SECONDS)
            except (OSError, EOFError, asyncio.TimeoutError, ValueError):
                found.failed += 1
                return
            if status == 200:
                found.seconds.append(time.perf_counter() - begun)
                found.names.append(request.name)
            else:
                found.failed += 1
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    done = await asyncio.gather(*(work() for _ in range(CONNECTIONS)), return_exceptions=True)
    found.failed += len(due) if rate else 0
    found.failed += sum(isinstance(one, BaseException) for one in done)
    found.elapsed = time.perf_counter() - start
    return found


async def _answer(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    lengths = [int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")]
    await reader.readexactly(lengths[0] if lengths else 0)
    return int(head.split(b" ", 2)[1])


async def seconds_until_cut_off(port: int, limit: float) -> float | None:
    """Send a request of which the end never comes; return when the server hangs up.

    Returns None when it has not within `limit` seconds.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start = time.perf_counter()
    try:
        while time.perf_counter() - start < limit:
            with suppress(OSError):
                writer.write(b"GET /" if time.perf_counter() - start < 1 else b"x")
            with suppress(asyncio.TimeoutError):
                try:
                    more = await asyncio.wait_for(reader.read(1000), 1.0)
                except ConnectionError:  # the server does not say goodbye
                    more = b""
                if not more:
                    return time.perf_counter() - start
        return None
    finally:
        writer.close()
