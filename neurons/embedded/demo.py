"""A demonstration on this machine: a subnet, its web pages, and a competition with a ranking."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr
from sqlalchemy.engine import URL

from harness.files import write_atomically
from neurons.embedded.log_tail import LogTail
from neurons.embedded.settings import (
    CPU_LENGTH,
    choose_port,
    common_environment,
    embedded_settings,
    miner_settings,
)
from neurons.embedded.subnet import QUIET_SECONDS, EmbeddedSubnet
from neurons.embedded.upstream import make_upstream
from neurons.runtime.child import Child
from neurons.runtime.errors import QuasarError
from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.identity import Identity, create_throwaway
from neurons.runtime.loading import environment
from neurons.runtime.network import client_options
from neurons.runtime.observe import get_logger
from neurons.runtime.process import Stopped
from neurons.runtime.values import PROJECT
from neurons.wire.client import ApiClient
from neurons.wire.connection import Connection
from neurons.wire.protocol import Message, Round, Weights
from neurons.wire.rules import TOP_SHARES
from quasar_kernels.contract import OVERLAY, QUASAR_DIR, copy_overlay

DATABASE, GUEST = "competition.db", "guest"
"""The ranking's file, and the wallet of one more miner that may join while the pages are served."""
READY_SECONDS, VERDICT_SECONDS = 180.0, 1800.0
CODE = ("neurons", "harness", "quasar_kernels")
CHUNK = "chunk_size: int = {}"
"""The overlay's text that each miner changes, from 64."""
CHUNKS = (64, 1, 4, 16, 2, 32)
"""Tokens in a step of each miner's kernel; the second miner's kernel is clearly slower."""
CHEAT = '''

def chunk_quasar(q, k, v, beta, *_, **__):
    """Skip the recurrence: much faster, and wrong."""
    return v + 0 * (q + k + beta.sum()), None
'''
CHEATS_CLAIM = 5e6

log = get_logger("embedded")
working = partial(heartbeat, log, first=QUIET_SECONDS, longest=QUIET_SECONDS)


@dataclass
class Entry:
    """One participant and its result."""

    name: str
    identity: Identity
    chunk: int | None  # tokens in a step of its kernel; None: it skips the recurrence
    rank: int | None = None
    claim: float = 0.0  # tokens/s
    weight: float = 0.0  # its share of the emission in the round that has ended
    reason: str = ""  # of its verdict, from the validator's log

    def __str__(self) -> str:
        kernel = f"overlay, steps of {self.chunk}" if self.chunk else "skips the recurrence"
        return (
            f"{self.rank or '-':>4}  {self.name:<8} {kernel:<24} {self.claim:>11,.1f} "
            f"{self.weight:>6.2f}  {self.reason}"
        )


class Demo:
    """What `python -m neurons.embedded` runs.

    Args:
        folder: the state folder, by default STATE_DIR; all files lie in its folder `embedded`.
        miners: honest miners, each the real daemon for one cycle.
        inference: whether each miner has an inference server, which the validator verifies.
        cheat: whether one more participant submits a kernel that skips the recurrence.
        serve: whether pages, API and validator keep running until `stop` is set.
    """

    def __init__(
        self,
        folder: Path | None,
        miners: int,
        *,
        inference: bool,
        cheat: bool,
        stop: threading.Event,
        serve: bool = False,
    ) -> None:
        flags: dict[str, object] = {"state_dir": folder} if folder else {}
        settings = embedded_settings({**flags, "log_format": "json"}, environment())
        self.folder = settings.state_dir
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        kernels = {f"miner-{n}": chunk for n, chunk in enumerate(CHUNKS[:miners], 1)}
        self.entries = [
            Entry(name, create_throwaway(settings.wallet_path, name), chunk)
            for name, chunk in {**kernels, **({"cheat": None} if cheat else {})}.items()
        ]
        self._stop, self._serve, self._ports = stop, serve, dict[str, int]()
        if inference:
            names = ["reference", *kernels]
            self._ports = {name: choose_port(self.folder / f"{name}.port") for name in names}
        address = {name: f"http://127.0.0.1:{port}" for name, port in self._ports.items()}
        hotkeys = {entry.name: entry.identity.hotkey for entry in self.entries}
        database = URL.create("sqlite", database=str(self.folder / DATABASE)).render_as_string()
        changes: dict[str, object] = {"database_url": SecretStr(database)}
        if inference:
            servers = tuple(f"{hotkeys[name]}={address[name]}" for name in kernels)
            changes |= {"enable_logit_verification": True, "inference_servers": servers}
            changes["reference_inference_url"] = address["reference"]
        self.settings = settings.model_copy(update=changes)
        self.subnet: EmbeddedSubnet | None = None

    def run(self) -> Iterator[str]:
        """Run everything and yield progress lines; raise a QuasarError if a part fails."""
        self._clear()
        with EmbeddedSubnet(self.settings, self._stop) as self.subnet:
            self.settings = self.subnet.settings
            url = str(self.settings.validator_api_url)
            yield f"the leaderboard is at {url}/"
            if self._ports:
                self._serve_models(self.subnet)
                yield f"{len(self._ports)} inference servers are loaded"
            if self.entries:
                yield from self._compete(url, self.subnet)
            if self._serve:
                guest = shlex.quote(str(self._write_guest_settings()))
                yield f"one more miner joins by: ENV_FILE={guest} ./START_MINER.sh once"
                yield f"the leaderboard stays at {url}/ until Ctrl-C"
                self._stop.wait()
                self.subnet.check()

    def is_expected(self) -> bool:
        """Return whether each honest miner has a rank and its share, and the cheat neither."""
        honest = [entry for entry in self.entries if entry.chunk]
        shares = [*TOP_SHARES, *(0.0 for _ in honest)]
        by_rank = sorted(honest, key=lambda entry: entry.rank or 0)
        return all(
            (entry.rank, entry.weight) == (rank, share)
            for rank, (entry, share) in enumerate(zip(by_rank, shares, strict=False), 1)
        ) and all(e.reason and not e.rank and not e.weight for e in self.entries if not e.chunk)

    def _compete(self, url: str, subnet: EmbeddedSubnet) -> Iterator[str]:
        for entry in sorted(self.entries, key=lambda entry: entry.chunk is not None):
            if entry.chunk is None:
                self.submit_cheat(url, entry)
                yield "the cheat has submitted"
            else:
                status = self._mine(entry, entry.chunk)
                yield f"{entry.name} ended with status {status} ({self.folder / entry.name}.log)"
        self._wait(VERDICT_SECONDS, lambda: self.read_verdicts(url), "the last verdict")
        yield self.end_round(url, subnet.validator)
        self._wait(READY_SECONDS, self._has_logged_weights, "the validator's weights")
        self.read_verdicts(url)  # with the final ranks
        yield "the validator has computed the weights"
        yield f"{'rank':>4}  {'miner':<8} {'kernel':<24} {'claim':>11} {'weight':>6}  verdict"
        yield from map(str, sorted(self.entries, key=lambda entry: entry.rank or 99))

    def read_verdicts(self, url: str) -> bool:
        """Store ranks, claims and verdicts in the entries; return whether each has a verdict."""
        options = client_options(url)
        reply = httpx.get(f"{url}/get_submission_stats", params={"limit": 100}, **options)
        rows = {r["miner_hotkey"]: r for r in reply.json()["top_performers"] if r.get("validated")}
        reasons = {int(line["submission"]): str(line["reason"]) for line in self._logged("verdict")}
        for entry in self.entries:
            if row := rows.get(entry.identity.hotkey):
                entry.rank, entry.claim = row.get("rank"), row["tokens_per_sec"]
                entry.reason = reasons.get(row["id"], "")
        return all(entry.reason for entry in self.entries)

    def end_round(self, url: str, validator: Identity) -> str:
        """End the round by a validator's request and store the weights; return a progress line."""
        with closing(Connection(url, validator)) as api:
            ending = api.exchange("GET", "/get_current_round", Round)
            api.exchange("POST", f"/finalize_round/{ending.id}", Message, bound=True)
            only = {"round_id": ending.id}
            rows = api.exchange("GET", "/get_weights", Weights, query=only).weights
        for entry in self.entries:
            entry.weight = sum(row.weight for row in rows if row.hotkey == entry.identity.hotkey)
        return f"round {ending.round_number} has ended"

    def submit_cheat(self, url: str, entry: Entry) -> None:
        """Submit a fork that keeps the rules but skips the recurrence, with a high claim."""
        repository, target = self.folder / "cheat.git", self.settings.target_sequence_length

        def change(source: Path) -> None:
            copy_overlay(OVERLAY, source)
            with (source / QUASAR_DIR / "chunk.py").open("a") as file:
                file.write(CHEAT)

        fork = make_upstream(repository, change)
        claim = {
            "miner_hotkey": entry.identity.hotkey,
            "fork_url": fork,
            "commit_hash": (repository / "refs/heads/main").read_text().strip(),
            "tokens_per_sec": CHEATS_CLAIM,
        }
        with closing(ApiClient(url, entry.identity)) as api:
            api.register("cheat", "100k")
            api.submit(target if isinstance(target, int) else CPU_LENGTH, claim, wire_version=1)

    def _mine(self, entry: Entry, chunk: int) -> int:
        """Run a miner's cycle from its own copy of the code, show its log, return its status."""
        home = self.folder / entry.name
        code, tail = home / "code", LogTail(entry.name, home.with_suffix(".log"))
        for part in CODE:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PROJECT / part, code / part, ignore=ignored)
        kernel = code / "quasar_kernels/overlay" / QUASAR_DIR / "chunk_torch.py"
        kernel.write_text(kernel.read_text().replace(CHUNK.format(64), CHUNK.format(chunk)))
        own = {"PYTHONPATH": str(code), "SUBMISSION_MODE": "direct"}
        own |= miner_settings(self.settings, entry.name, home)
        with tail.file.open("ab") as output, working(f"{entry.name}'s cycle"):
            process = subprocess.Popen(
                [sys.executable, "-m", "neurons.miner", "once"],
                cwd=code,
                env=common_environment(self.settings) | own,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                while process.poll() is None:
                    self._pause()
                    tail.show()
            finally:
                process.terminate()
                process.wait()
                tail.show()
        return process.returncode

    def _serve_models(self, subnet: EmbeddedSubnet) -> None:
        """Create a small model and serve it on every port until the subnet stops."""
        model, shared = self.folder / "model", common_environment(self.settings)
        shared["DEVICE"] = self.settings.device
        if not (model / "config.json").is_file():
            command = [sys.executable, "-m", "neurons.inference_server.sample", str(model)]
            with working("a small language model is made"):
                subprocess.run(command, env=shared, check=True, capture_output=True)
        shared |= {"REFERENCE_MODEL": str(model), "INFERENCE_DTYPE": "float32"}
        shared["VALIDATOR_HOTKEYS"] = subnet.validator.hotkey
        for name, port in self._ports.items():
            own = {**shared, "MINER_INFERENCE_PORT": str(port)}
            file = self.folder / f"inference-{name}.log"
            program = ["neurons.inference_server"]
            subnet.supervise(Child(f"inference server of {name}", program, own, file))
        for port in self._ports.values():
            what = f"the inference server at port {port}"
            self._wait(READY_SECONDS, lambda: is_healthy(port), what)  # noqa: B023

    def _clear(self) -> None:
        """Delete an earlier competition, so that its submissions are not in this one's ranking."""
        for old in self.folder.glob(f"{DATABASE}*"):
            old.unlink()
        for name in ("cheat.git", GUEST, *(entry.name for entry in self.entries)):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _write_guest_settings(self) -> Path:
        """Write the settings file with which one more miner joins; return its path."""
        create_throwaway(self.settings.wallet_path, GUEST)
        values = miner_settings(self.settings, GUEST, self.folder / GUEST)
        file = self.folder / "guest.env"
        text = "".join(f"{name}={value}\n" for name, value in values.items())
        write_atomically(file, text, mode=0o600)
        return file

    def _wait(self, seconds: float, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + seconds
        with working(f"wait for {what}"):
            while True:
                with suppress(httpx.HTTPError, KeyError):
                    if condition():
                        return
                if time.monotonic() > deadline:
                    raise QuasarError(f"After {seconds:g} s {what} is missing; see {self.folder}.")
                self._pause()

    def _pause(self) -> None:
        """Wait half a second; raise Stopped, or the fault that has stopped the subnet."""
        if self._stop.wait(0.5):
            if self.subnet is not None:
                self.subnet.check()
            raise Stopped("stop requested")

    def _has_logged_weights(self) -> bool:
        shares = {entry.identity.hotkey: entry.weight for entry in self.entries if entry.weight}
        return any(line["shares"] == shares for line in self._logged("weights"))

    def _logged(self, event: str) -> list[dict[str, Any]]:
        lines = self.subnet.lines if self.subnet is not None else ()
        return [line for line in list(lines) if line["event"] == event]


def is_healthy(port: int) -> bool:
    """Return whether the inference server at a port has loaded its model."""
    reply = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
    return bool(reply.json()["status"] == "healthy")
