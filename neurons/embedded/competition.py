"""A demonstration on this machine: a subnet, its web pages, and a competition with a ranking."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import httpx
from pydantic import SecretStr
from sqlalchemy.engine import URL

from harness.files import write_atomically
from neurons.embedded.log_tail import LogTail
from neurons.embedded.participants import CHUNKS, Entry, start_miner, submit_cheat
from neurons.embedded.results import Results
from neurons.embedded.settings import (
    choose_port,
    common_environment,
    embedded_settings,
    miner_settings,
)
from neurons.embedded.subnet import QUIET_SECONDS, EmbeddedSubnet
from neurons.runtime.child import Child
from neurons.runtime.errors import QuasarError
from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.identity import create_throwaway
from neurons.runtime.loading import environment
from neurons.runtime.observe import get_logger
from neurons.runtime.process import Stopped
from neurons.runtime.settings import Settings

DATABASE = "competition.db"
GUEST = "guest"
"""The wallet of one more miner, which an operator may start while the pages are served."""
READY_SECONDS, VERDICT_SECONDS = 180.0, 1800.0

log = get_logger("embedded")


class Competition:
    """The competition that `python -m neurons.embedded` runs.

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
        key = partial(create_throwaway, settings.wallet_path)
        self.entries = [
            Entry(f"miner-{n}", f"overlay, steps of {tokens}", key(f"miner-{n}"))
            for n, tokens in enumerate(CHUNKS[:miners], 1)
        ]
        self.cheat = Entry("cheat", "skips the recurrence", key("cheat")) if cheat else None
        self._stop, self._ports, self._serve = stop, {}, serve
        self._check: Callable[[], None] = lambda: None
        if inference:
            names = ["reference", *(entry.name for entry in self.entries)]
            self._ports = {name: choose_port(self.folder / f"{name}.port") for name in names}
            settings = settings.model_copy(update=self._verification_settings())
        database = URL.create("sqlite", database=str(self.folder / DATABASE)).render_as_string()
        self.settings = settings.model_copy(update={"database_url": SecretStr(database)})

    def run(self) -> Iterator[str]:
        """Run everything and yield progress lines; raise a QuasarError if a part fails."""
        self._clear()
        with EmbeddedSubnet(self.settings, self._stop) as subnet:
            self._check, url = subnet.check, str(subnet.settings.validator_api_url)
            yield f"the leaderboard is at {url}/"
            if self._ports:
                self._serve_models(subnet)
                yield f"{len(self._ports)} inference servers are loaded"
            if self.entries or self.cheat:
                yield from self._compete(subnet, url)
            if self._serve:
                guest = self._write_guest_settings(subnet.settings)
                variable = f"ENV_FILE={shlex.quote(str(guest))}"
                yield f"one more miner joins by: {variable} ./START_MINER.sh once"
                yield f"the leaderboard stays at {url}/ until Ctrl-C"
                self._stop.wait()
                self._check()

    def _compete(self, subnet: EmbeddedSubnet, url: str) -> Iterator[str]:
        everybody = [*self.entries, *([self.cheat] if self.cheat else [])]
        results = Results(url, everybody, subnet.validator, subnet.lines)
        if self.cheat is not None:
            submit_cheat(self.settings, url, self.cheat, self.folder / "cheat.git")
            yield "the cheat has submitted"
        for entry, tokens in zip(self.entries, CHUNKS, strict=False):
            status = self._mine(subnet.settings, entry, tokens)
            yield f"{entry.name} ended with status {status} ({self.folder / entry.name}.log)"
        self._wait(VERDICT_SECONDS, results.all_judged, "the last verdict")
        yield results.end_round()
        self._wait(READY_SECONDS, results.are_final, "the validator's weights")
        yield "the validator has computed the weights"
        yield from results.table()

    def _clear(self) -> None:
        """Delete an earlier competition, so that its submissions are not in this one's ranking."""
        for old in self.folder.glob(f"{DATABASE}*"):
            old.unlink()
        for name in ("cheat.git", GUEST, *(entry.name for entry in self.entries)):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _write_guest_settings(self, settings: Settings) -> Path:
        """Write the settings file with which one more miner joins; return its path."""
        create_throwaway(settings.wallet_path, GUEST)
        values = miner_settings(settings, GUEST, self.folder / GUEST)
        file = self.folder / "guest.env"
        text = "".join(f"{name}={value}\n" for name, value in values.items())
        write_atomically(file, text, mode=0o600)
        return file

    def _verification_settings(self) -> dict[str, object]:
        address = "http://127.0.0.1:{}".format
        servers = [
            f"{entry.identity.hotkey}={address(self._ports[entry.name])}" for entry in self.entries
        ]
        return {
            "enable_logit_verification": True,
            "inference_servers": tuple(servers),
            "reference_inference_url": address(self._ports["reference"]),
        }

    def _serve_models(self, subnet: EmbeddedSubnet) -> None:
        """Create a small model and serve it on every port until the subnet stops."""
        model = self.folder / "model"
        environment = {**common_environment(self.settings), "DEVICE": self.settings.device}
        if not (model / "config.json").is_file():
            command = [sys.executable, "-m", "neurons.inference_server.sample", str(model)]
            with self._heartbeat("a small language model is made"):
                subprocess.run(command, env=environment, check=True, capture_output=True)
        environment |= {
            "REFERENCE_MODEL": str(model),
            "VALIDATOR_HOTKEYS": subnet.validator.hotkey,
            "INFERENCE_DTYPE": "float32",
        }
        for name, port in self._ports.items():
            subnet.supervise(
                Child(
                    f"inference server of {name}",
                    ["neurons.inference_server"],
                    {**environment, "MINER_INFERENCE_PORT": str(port)},
                    self.folder / f"inference-{name}.log",
                )
            )
        for port in self._ports.values():
            what = f"the inference server at port {port}"
            self._wait(READY_SECONDS, lambda: _is_healthy(port), what)  # noqa: B023

    def _mine(self, settings: Settings, entry: Entry, chunk: int) -> int:
        """Run a miner's cycle and show its log; return its exit status."""
        home = self.folder / entry.name
        tail = LogTail(entry.name, home.with_suffix(".log"))
        with self._heartbeat(f"{entry.name}'s cycle"):
            process = start_miner(settings, entry, chunk, home, tail.file)
            try:
                while process.poll() is None:
                    self._pause()
                    tail.show()
            finally:
                process.terminate()
                process.wait()
                tail.show()
        return process.returncode

    def _wait(self, seconds: float, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + seconds
        with self._heartbeat(f"wait for {what}"):
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
            self._check()
            raise Stopped("stop requested")

    def _heartbeat(self, work: str) -> AbstractContextManager[None]:
        return heartbeat(log, work, first=QUIET_SECONDS, longest=QUIET_SECONDS)


def _is_healthy(port: int) -> bool:
    reply = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
    return bool(reply.json()["status"] == "healthy")
