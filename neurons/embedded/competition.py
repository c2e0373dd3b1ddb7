"""A competition on this machine: miners with kernels of their own, a cheat, and the ranking."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import httpx
from pydantic import SecretStr

from neurons.embedded import postgresql
from neurons.embedded.log_tail import LogTail
from neurons.embedded.results import Entry, Results, are_as_they_should_be
from neurons.embedded.subnet import (
    CPU_LENGTH,
    QUIET_SECONDS,
    EmbeddedSubnet,
    choose_port,
    common_environment,
    embedded_settings,
)
from neurons.embedded.upstream import make_upstream
from neurons.runtime.child import Child
from neurons.runtime.errors import QuasarError
from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.identity import Identity, create_throwaway
from neurons.runtime.loading import environment
from neurons.runtime.observe import get_logger
from neurons.runtime.process import Stopped
from neurons.runtime.settings import Settings
from neurons.runtime.values import PROJECT
from neurons.wire.protocol import HOTKEY_HEADER, SIGNATURE_HEADER, submission_text
from quasar_kernels.contract import OVERLAY, QUASAR_DIR

CODE = ("neurons", "harness", "quasar_kernels")
CHUNK = "chunk_size: int = 64"
"""What the second miner and later ones change."""

CHUNKS = (64, 1, 4, 16, 2, 32)
"""How many tokens a step of each miner takes: those of the second are slower beyond any noise."""

CHEAT = '''

def chunk_quasar(q, k, v, beta, *_, **__):
    """Skip the recurrence: much faster, and wrong."""
    return v + 0 * (q + k + beta.sum()), None
'''
CHEATS_CLAIM = 5e6
DATABASE = "competition.db"
READY_SECONDS, VERDICT_SECONDS = 180.0, 1800.0

log = get_logger("embedded")


class Competition:
    """What `python -m neurons.embedded` runs.

    Args:
        folder: where everything lies; the embedded run's own state without it.
        miners: how many honest ones; each is the real daemon, for one cycle.
        inference: whether each has an inference server, and the validator verifies it.
        cheat: whether one more submits a kernel that skips the recurrence.
        serve: whether the pages stay after the ranking, until `stop` is set.
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
        self.entries = [
            Entry(f"miner-{n}", f"overlay, steps of {tokens}", self._key(settings, n))
            for n, tokens in enumerate(CHUNKS[:miners], 1)
        ]
        self.cheat = None
        if cheat:
            self.cheat = Entry("cheat", "skips the recurrence", self._key(settings, 0))
        self._stop, self._servers, self._serve = stop, {}, serve
        self._check: Callable[[], None] = lambda: None
        if inference:
            names = ["reference", *(entry.name for entry in self.entries)]
            self._servers = {name: choose_port(self.folder / f"{name}.port") for name in names}
            settings = settings.model_copy(update=self._verification())
        self.settings = settings

    @property
    def as_it_should_be(self) -> bool:
        """Whether every honest miner has its place and share, and the cheat none."""
        return are_as_they_should_be(self.entries, self.cheat)

    def run(self) -> Iterator[str]:
        """Run everything; yield lines that say what happens, the ranking last.

        Raises:
            QuasarError: a part does not start or does not end.
        """
        self._clear()
        with self._database() as (database, name):
            yield f"the database is {name}"
            settings = self.settings.model_copy(update={"database_url": SecretStr(database)})
            with EmbeddedSubnet(settings, self._stop) as subnet:
                self._check, url = subnet.check, str(subnet.settings.validator_api_url)
                yield f"the leaderboard is at {url}/"
                with self._inference(subnet.validator.hotkey):
                    if self._servers:
                        yield f"{len(self._servers)} inference servers are loaded"
                    yield from self._compete(subnet, url)
                    if self._serve:
                        yield f"the leaderboard stays at {url}/ until Ctrl-C"
                        self._stop.wait()

    def _compete(self, subnet: EmbeddedSubnet, url: str) -> Iterator[str]:
        everybody = [*self.entries, *([self.cheat] if self.cheat else [])]
        results = Results(url, everybody, subnet.validator, self.folder / "validator.log")
        if self.cheat is not None:
            self._submit_cheat(url, self.cheat)
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
        """Forget an earlier competition: its winner would be what this one's miners must beat."""
        for old in self.folder.glob(f"{DATABASE}*"):
            old.unlink()
        for name in ("cheat.git", *(entry.name for entry in self.entries)):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    @contextmanager
    def _database(self) -> Iterator[tuple[str, str]]:
        """Give the API's database and its name: PostgreSQL's where that is installed."""
        lacking = postgresql.find_lack()
        if lacking:
            yield f"sqlite:///{self.folder / DATABASE}", f"SQLite (PostgreSQL: {lacking})"
            return
        with postgresql.serve() as server:
            yield server.new_database(), "PostgreSQL, a server of its own"

    def _key(self, settings: Settings, number: int) -> Identity:
        return create_throwaway(settings.wallet_path, f"miner-{number}" if number else "cheat")

    def _verification(self) -> dict[str, object]:
        address = "http://127.0.0.1:{}".format
        servers = [
            f"{entry.identity.hotkey}={address(self._servers[entry.name])}"
            for entry in self.entries
        ]
        return {
            "enable_logit_verification": True,
            "inference_servers": tuple(servers),
            "reference_inference_url": address(self._servers["reference"]),
        }

    @contextmanager
    def _inference(self, validator: str) -> Iterator[None]:
        """Serve a small model, made here, on every port until the block is left."""
        if not self._servers:
            yield
            return
        model = self.folder / "model"
        environment = {**common_environment(self.settings), "DEVICE": self.settings.device}
        if not (model / "config.json").is_file():
            command = [sys.executable, "-m", "neurons.inference_server.sample", str(model)]
            with self._heartbeat("a small language model is made"):
                subprocess.run(command, env=environment, check=True, capture_output=True)
        children = [
            Child(
                f"inference server of {name}",
                ["neurons.inference_server"],
                {
                    **environment,
                    "REFERENCE_MODEL": str(model),
                    "VALIDATOR_HOTKEYS": validator,
                    "MINER_INFERENCE_PORT": str(port),
                    "INFERENCE_DTYPE": "float32",
                },
                self.folder / f"inference-{name}.log",
            )
            for name, port in self._servers.items()
        ]
        try:
            for child in children:
                child.watch()
            for port in self._servers.values():
                what = f"the inference server at port {port}"
                self._wait(READY_SECONDS, lambda: _is_healthy(port), what)  # noqa: B023
            yield
        finally:
            for child in children:
                child.ask_to_stop()
            for child in children:
                child.stop()

    def _mine(self, settings: Settings, entry: Entry, chunk: int) -> int:
        """Run the daemon for one cycle with the code and the kernels of this miner."""
        home = self.folder / entry.name
        code = home / "code"
        shutil.rmtree(code, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__")
        for part in CODE:
            shutil.copytree(PROJECT / part, code / part, ignore=ignored)
        file = code / "quasar_kernels/overlay" / QUASAR_DIR / "chunk_torch.py"
        file.write_text(file.read_text().replace(CHUNK, f"chunk_size: int = {chunk}"))
        environment = {
            **common_environment(settings),
            "PYTHONPATH": str(code),
            "DEVICE": settings.device,
            "VALIDATOR_API_URL": str(settings.validator_api_url),
            "FORK_REMOTE": str(home / "fork.git"),
            "FORK_UPSTREAM_URL": str(settings.fork_upstream_url),
            "STATE_DIR": str(home / "state"),
            "WALLET_PATH": str(settings.wallet_path),
            "WALLET_MINER_NAME": entry.name,
            "SUBMISSION_MODE": "direct",
            "TARGET_SEQUENCE_LENGTH": str(settings.target_sequence_length),
            "CLAIM_RUNS": str(settings.claim_runs),
            "CLAIM_HEADROOM": str(settings.claim_headroom),
        }
        file = home.with_suffix(".log")
        tail = LogTail(entry.name, file)
        with file.open("ab") as output, self._heartbeat(f"{entry.name}'s cycle"):
            command = [sys.executable, "-m", "neurons.miner", "once"]
            process = subprocess.Popen(
                command,
                cwd=code,
                env=environment,
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

    def _submit_cheat(self, url: str, entry: Entry) -> None:
        def change(source: Path) -> None:
            # byte code of an earlier import would break the rules before anything is timed
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(OVERLAY, source, dirs_exist_ok=True, ignore=ignored)
            file = source / QUASAR_DIR / "chunk.py"
            file.write_text(file.read_text() + CHEAT)

        fork = make_upstream(self.folder / "cheat.git", change)
        head = self.folder / "cheat.git/refs/heads/main"
        commit, key = head.read_text().strip(), entry.identity
        target = self.settings.target_sequence_length
        body = {
            "miner_hotkey": key.hotkey,
            "fork_url": fork,
            "commit_hash": commit,
            "target_sequence_length": target if isinstance(target, int) else CPU_LENGTH,
            "tokens_per_sec": CHEATS_CLAIM,
            "signature": key.sign(submission_text(fork, commit, CHEATS_CLAIM, None)),
        }
        headers = {HOTKEY_HEADER: key.hotkey, SIGNATURE_HEADER: key.sign(key.hotkey)}
        registration = {"hotkey": key.hotkey, "model_name": "cheat", "league": "100k"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False) as http:
            for route, content in (("register_miner", registration), ("submit_kernel", body)):
                http.post(f"/{route}", json=content).raise_for_status()

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
        """Wait a moment.

        Raises:
            Stopped: on request.
            QuasarError: the validator cannot judge.
        """
        if self._stop.wait(0.5):
            self._check()
            raise Stopped("asked to stop")

    def _heartbeat(self, work: str) -> AbstractContextManager[None]:
        return heartbeat(log, work, first=QUIET_SECONDS, longest=QUIET_SECONDS)


def _is_healthy(port: int) -> bool:
    reply = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
    return bool(reply.json()["status"] == "healthy")
