"""The endpoints /metrics and /healthz of a running miner, on loopback and off by default.

Like `status`, both read a copy of the journal instead of the daemon's memory.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neurons.miner.command_line.status import Status, deadline_of, read_status
from neurons.miner.cycle import State
from neurons.runtime.errors import ConfigError, Problem, QuasarError
from neurons.runtime.flags import version
from neurons.runtime.machine import gpu_states
from neurons.runtime.observe import get_logger
from neurons.runtime.process import START_BYTES
from neurons.wire.rules import BLOCK_SECONDS, block_at

HOST = "127.0.0.1"
HISTORY = 1000
IDLE_SECONDS = 10.0
INSTALL = "Run scripts/install.sh metrics, or unset it."

log = get_logger("metrics")


def figures(status: Status, now: float) -> Iterator[tuple[str, str, dict[str, str], float]]:
    """Yield name, meaning, labels and value of every figure of the journal; `now` is Unix time."""
    ended = Counter(one.state.value for one in status.history if one.closed)
    for state, count in sorted(ended.items()):
        meaning = "Closed submissions among the newest 1000, by final state"
        yield "ended", meaning, {"state": state}, count
    one = status.submission
    if one is None:
        return
    yield "state", "1 for the state of the submission", {"state": one.state.value}, 1
    yield "failures_in_a_row", "Failed tries of the present step", {}, one.attempts
    if one.tokens_per_sec is not None:
        yield "claim_tokens_per_second", "The claim", {}, one.tokens_per_sec
    deadline = deadline_of(one, now)
    if deadline is not None:
        yield "retry_seconds", "Until the next try", {}, max(0.0, deadline - now)
    if one.state is State.COMMITTED and one.reveal_block is not None:
        blocks = max(0, one.reveal_block - block_at(now))
        yield "reveal_seconds", "Until the reveal block", {}, blocks * BLOCK_SECONDS
    if status.verdict is not None:
        verdict = {"state": status.verdict.state.value}
        yield "last_verdict", "1 for the last verdict", verdict, 1
        if status.verdict.rank is not None:
            yield "rank", "The rank of the last verdict", {}, status.verdict.rank


def exposition(state_dir: Path, hotkey: str | None = None) -> bytes:
    """Return every figure in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry, gauges = CollectorRegistry(), {}
    gpus = (
        (f"gpu_{name}", "As NVML reports it", {"gpu": str(index)}, value)
        for index, gpu in enumerate(gpu_states())
        for name, value in gpu.items()
    )
    info = ("info", "The version", {"version": version()}, 1)
    values = figures(read_status(state_dir, hotkey, HISTORY), time.time())
    for name, meaning, labels, value in (info, *values, *gpus):
        if name not in gauges:
            gauges[name] = Gauge(f"quasar_{name}", meaning, list(labels), registry=registry)
        (gauges[name].labels(**labels) if labels else gauges[name]).set(value)
    return bytes(generate_latest(registry))


def health(state_dir: Path, hotkey: str | None = None) -> dict[str, Any]:
    """Return the status: ok with the submission's state, or held or degraded with a reason.

    The miner is degraded if its disk is full.
    """
    if shutil.disk_usage(state_dir).free < START_BYTES:
        return {"status": "degraded", "reason": f"the disk of {state_dir} is full"}
    one = read_status(state_dir, hotkey).submission
    if one is not None and one.state is State.HELD:
        return {"status": "held", "reason": one.reason, "remedy": one.remedy}
    return {"status": "ok", "state": None if one is None else one.state.value}


@contextmanager
def serving(state_dir: Path, port: int | None, hotkey: str | None = None) -> Iterator[int | None]:
    """Serve on `port` of 127.0.0.1 during the block; 0 selects a free port. None: do not serve.

    Raises a ConfigError if the port is taken, or prometheus-client is not installed.
    """
    if port is None:
        yield None
        return
    if find_spec("prometheus_client") is None:
        raise ConfigError(Problem(f"METRICS_PORT={port} needs prometheus-client.", INSTALL))

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_SECONDS  # a silent client must not keep a thread and a descriptor

        def do_GET(self) -> None:
            try:
                status, kind, body = _answer(self.path, state_dir, hotkey)
            except (QuasarError, OSError) as error:
                status, kind, body = 503, "text/plain", str(error).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, because a monitor sends a request every few seconds."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        problem = f"METRICS_PORT={port} cannot be used ({error.strerror})."
        raise ConfigError(Problem(problem, "Name another port.")) from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    log.info("metrics ready", url=f"http://{HOST}:{server.server_port}/metrics")
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _answer(path: str, state_dir: Path, hotkey: str | None) -> tuple[int, str, bytes]:
    if path == "/metrics":
        return 200, "text/plain; version=0.0.4; charset=utf-8", exposition(state_dir, hotkey)
    status, report = 404, {"detail": "there are /metrics and /healthz"}
    if path == "/healthz":
        report = health(state_dir, hotkey)
        status = 200 if report["status"] == "ok" else 503
    return status, "application/json", json.dumps(report).encode()
