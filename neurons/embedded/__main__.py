"""`python -m neurons.embedded`: a subnet on this machine with a competition and its web pages."""

from __future__ import annotations

from quasar_kernels import interrupts

if __name__ == "__main__":
    interrupts.exit_on_ctrl_c()  # during the imports below

import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx

from harness.files import write_atomically
from harness.terminal import printable
from neurons.embedded.settings import (
    CPU_LENGTH,
    choose_port,
    embedded_settings,
    process_environment,
    variables,
)
from neurons.embedded.subnet import QUIET_SECONDS, EmbeddedSubnet
from neurons.embedded.upstream import make_upstream
from neurons.runtime import flags, observe
from neurons.runtime.child import Child
from neurons.runtime.errors import EX_CONFIG, ConfigError, QuasarError
from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.identity import Identity, create_throwaway
from neurons.runtime.loading import environment
from neurons.runtime.process import Stopped, stop_on_signals
from neurons.runtime.values import PROJECT
from neurons.wire.client import ApiClient
from neurons.wire.connection import Connection
from neurons.wire.protocol import Message, Round, Weights
from neurons.wire.rules import TOP_SHARES
from quasar_kernels.contract import OVERLAY, QUASAR_DIR, copy_overlay

RANKING, GUEST = "competition", "guest"
"""The folder of the API's database, and the wallet of one more miner that may join later."""
READY_SECONDS, VERDICT_SECONDS = 180.0, 1800.0
CODE = ("neurons", "harness", "quasar_kernels")
CHUNK = "chunk_size: int = {}"
"""The text that sets the chunk size to 64 in the overlay, the kernels that a miner copies over its
fork. Each miner's copy has a size of CHUNKS instead."""
CHUNKS = (64, 1, 4, 16, 2, 32)
"""Tokens in a step of each miner's kernel; the second miner's kernel is clearly slower."""
CHEAT = '''

def chunk_quasar(q, k, v, beta, *_, **__):
    """Skip the recurrence: much faster, and wrong."""
    return v + 0 * (q + k + beta.sum()), None
'''
CHEATS_CLAIM = 5e6

log = observe.get_logger("embedded")
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
    """A competition on this machine.

    Args:
        folder: the state folder, by default STATE_DIR; all files lie in its folder `embedded`.
        miners: number of honest miners, each of which runs the real daemon for one cycle.
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
        settings = embedded_settings({"state_dir": folder}, environment())
        self.folder, self._stop, self._serve = settings.state_dir, stop, serve
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        kernels = {f"miner-{n}": chunk for n, chunk in enumerate(CHUNKS[:miners], 1)}
        self.entries = [
            Entry(name, create_throwaway(settings.wallet_path, name), chunk)
            for name, chunk in {**kernels, **({"cheat": None} if cheat else {})}.items()
        ]
        self._ports = {
            name: choose_port(self.folder / f"{name}.port")
            for name in (["reference", *kernels] if inference else ())
        }
        if inference:
            address = {name: f"http://127.0.0.1:{port}" for name, port in self._ports.items()}
            servers = [
                f"{one.identity.hotkey}={address[one.name]}" for one in self.entries if one.chunk
            ]
            changes = {
                "enable_logit_verification": True,
                "inference_servers": tuple(servers),
                "reference_inference_url": address["reference"],
            }
            settings = settings.model_copy(update=changes)
        self.subnet = EmbeddedSubnet(settings, stop, RANKING)
        self.settings = self.subnet.settings
        self.url = str(self.settings.validator_api_url)

    def run(self) -> Iterator[str]:
        """Run everything and yield progress lines; raise a QuasarError if a part fails."""
        # submissions of an earlier competition must not be in this one's ranking
        for name in (RANKING, "cheat.git", GUEST, *(entry.name for entry in self.entries)):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        with self.subnet:
            yield f"the leaderboard is at {self.url}/"
            if self._ports:
                self._serve_models()
                yield f"{len(self._ports)} inference servers are loaded"
            if self.entries:
                yield from self._compete()
            if self._serve:
                guest = shlex.quote(str(self._write_guest_settings()))
                yield f"to add one more miner, run: ENV_FILE={guest} ./START_MINER.sh once"
                yield f"the leaderboard stays at {self.url}/ until Ctrl-C"
                self._stop.wait()
                self.subnet.check()

    def is_expected(self) -> bool:
        """Return whether each honest miner has a rank and its share, and the cheat neither."""
        honest = sorted((e for e in self.entries if e.chunk), key=lambda e: e.rank or 0)
        shares = [*TOP_SHARES, *(0.0 for _ in honest)][: len(honest)]
        results = [(entry.rank, entry.weight) for entry in honest]
        cheats = [entry for entry in self.entries if not entry.chunk]
        return results == list(enumerate(shares, 1)) and all(
            e.reason and not e.rank and not e.weight for e in cheats
        )

    def _compete(self) -> Iterator[str]:
        for entry in sorted(self.entries, key=lambda entry: entry.chunk is not None):
            if entry.chunk is None:
                self.submit_cheat(entry)
                yield "the cheat has submitted"
            else:
                yield f"{entry.name} starts"
                yield f"{entry.name} has ended with status {self._mine(entry, entry.chunk)}"
        self._wait(VERDICT_SECONDS, self.read_verdicts, "the last verdict")
        yield self.end_round()
        self._wait(READY_SECONDS, self._has_logged_weights, "the validator's weights")
        self.read_verdicts()  # with the final ranks
        yield "the validator has computed the weights"
        yield f"{'rank':>4}  {'miner':<8} {'kernel':<24} {'claim':>11} {'weight':>6}  verdict"
        yield from map(str, sorted(self.entries, key=lambda entry: entry.rank or 99))

    def read_verdicts(self) -> bool:
        """Store ranks, claims and verdicts in the entries; return whether each has a verdict."""
        address = f"{self.url}/get_submission_stats?limit=100"
        best = httpx.get(address, trust_env=False).json()["top_performers"]
        rows = {row["miner_hotkey"]: row for row in best if row.get("validated")}
        reasons = {int(line["submission"]): str(line["reason"]) for line in self._logged("verdict")}
        for entry in self.entries:
            if row := rows.get(entry.identity.hotkey):
                entry.rank, entry.claim = row.get("rank"), row["tokens_per_sec"]
                entry.reason = reasons.get(row["id"], "")
        return all(entry.reason for entry in self.entries)

    def end_round(self) -> str:
        """End the round by a validator's request and store the weights; return a progress line."""
        with closing(Connection(self.url, self.subnet.validator)) as api:
            ending = api.exchange("GET", "/get_current_round", Round)
            api.exchange("POST", f"/finalize_round/{ending.id}", Message, bound=True)
            only = {"round_id": ending.id}
            rows = api.exchange("GET", "/get_weights", Weights, query=only).weights
        for entry in self.entries:
            entry.weight = sum(row.weight for row in rows if row.hotkey == entry.identity.hotkey)
        return f"round {ending.round_number} has ended"

    def submit_cheat(self, entry: Entry) -> None:
        """Submit a fork that passes the rule book's check of files, but skips the recurrence.

        Its claim is far too high.
        """
        repository, target = self.folder / "cheat.git", self.settings.target_sequence_length

        def change(source: Path) -> None:
            copy_overlay(OVERLAY, source)
            with (source / QUASAR_DIR / "chunk.py").open("a") as file:
                file.write(CHEAT)

        claim = {
            "miner_hotkey": entry.identity.hotkey,
            "fork_url": make_upstream(repository, change),
            "commit_hash": (repository / "refs/heads/main").read_text().strip(),
            "tokens_per_sec": CHEATS_CLAIM,
        }
        with closing(ApiClient(self.url, entry.identity)) as api:
            api.register("cheat", "100k")
            api.submit(target if isinstance(target, int) else CPU_LENGTH, claim, wire_version=1)

    def _mine(self, entry: Entry, chunk: int) -> int:
        """Run a miner's cycle from its own copy of the code; return its exit status."""
        code = self.folder / entry.name / "code"
        for part in CODE:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PROJECT / part, code / part, ignore=ignored)
        kernel = code / "quasar_kernels/overlay" / QUASAR_DIR / "chunk_torch.py"
        kernel.write_text(kernel.read_text().replace(CHUNK.format(64), CHUNK.format(chunk)))
        changes = self._miner(entry.name) | {"submission_mode": "direct"}
        env = process_environment(self.settings, **changes) | {"PYTHONPATH": str(code)}
        command = [sys.executable, "-m", "neurons.miner", "once"]
        process = subprocess.Popen(command, cwd=code, env=env, start_new_session=True)
        try:
            while process.poll() is None:
                self._pause()
        finally:
            process.terminate()
            process.wait()
        return process.returncode

    def _miner(self, name: str) -> dict[str, object]:
        """Return a miner's own settings: its folders and its wallet."""
        home = self.folder / name
        own = {"state_dir": home / "state", "fork_remote": home / "fork.git"}
        return {**own, "wallet_miner_name": name}

    def _serve_models(self) -> None:
        """Create a small model and serve it on every port until the subnet stops."""
        model, shared = self.folder / "model", process_environment(self.settings)
        if not (model / "config.json").is_file():
            command = [sys.executable, "-m", "neurons.inference_server.sample", str(model)]
            with working("a small language model is made"):
                subprocess.run(command, env=shared, check=True, capture_output=True)
        for name, port in self._ports.items():
            own = process_environment(
                self.settings,
                reference_model=model,
                inference_dtype="float32",
                miner_inference_port=port,
                validator_hotkeys=self.subnet.validator.hotkey,
                state_dir=self.folder / f"inference-{name}",
            )
            file = self.folder / f"inference-{name}.log"
            program = ["neurons.inference_server"]
            self.subnet.supervise(Child(f"inference server of {name}", program, own, file))
        for port in self._ports.values():
            what = f"the inference server at port {port}"
            self._wait(READY_SECONDS, partial(is_healthy, port), what)

    def _write_guest_settings(self) -> Path:
        """Write the settings file with which one more miner joins; return its path."""
        create_throwaway(self.settings.wallet_path, GUEST)
        values = variables(self.settings, **self._miner(GUEST))
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
                    problem = f"{what} did not appear within {seconds:g} s"
                    raise QuasarError(f"{problem}; see {self.folder}.")
                self._pause()

    def _pause(self) -> None:
        """Wait half a second. After a stop, raise the subnet's fault, or Stopped if it has none."""
        if self._stop.wait(0.5):
            self.subnet.check()
            raise Stopped("stop requested")

    def _has_logged_weights(self) -> bool:
        shares = {entry.identity.hotkey: entry.weight for entry in self.entries if entry.weight}
        return any(line["shares"] == shares for line in self._logged("weights"))

    def _logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in list(self.subnet.lines) if line["event"] == event]


def is_healthy(port: int) -> bool:
    """Return whether the inference server at a port has loaded its model."""
    reply = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
    return bool(reply.json()["status"] == "healthy")


@click.command(
    help="Runs an API with web pages, a validator and competing miners on this machine.",
    context_settings=flags.CONTEXT,
)
@click.option(
    "--miners", default=2, type=flags.Whole(0, 6), help="Honest miners; 0 for the pages alone."
)
@click.option("--inference", is_flag=True, help="Start inference servers, and verify logits.")
@click.option(
    "--cheat/--no-cheat",
    default=None,
    help="Add a miner with a wrong kernel (the default unless --miners is 0).",
)
@click.option(
    "--serve/--no-serve",
    default=None,
    help="Keep the pages until Ctrl-C (the default on a terminal, and without miners).",
)
@click.option("--folder", type=flags.Folder(), metavar="DIR", help="Use DIR/embedded for files.")
def command(
    miners: int, inference: bool, cheat: bool | None, serve: bool | None, folder: Path | None
) -> int:
    """Run the competition, print its ranking, and return the exit status."""
    observe.configure(ordinary=sys.stdout)
    stop = threading.Event()
    try:
        with stop_on_signals(stop):
            demo = Demo(
                folder,
                miners,
                inference=inference,
                cheat=bool(miners) if cheat is None else cheat,
                stop=stop,
                serve=(not miners or sys.stdout.isatty()) if serve is None else serve,
            )
            for line in demo.run():
                click.echo(printable(line))
    except Stopped:
        click.echo("stopped before the ranking")
        return 130
    except QuasarError as error:
        click.echo(str(error), err=True)
        return EX_CONFIG if isinstance(error, ConfigError) else 1
    return 0 if demo.is_expected() else 1


def main(arguments: Sequence[str] | None = None) -> int:
    return flags.run_command(command, "python -m neurons.embedded", arguments)


if __name__ == "__main__":
    interrupts.run(main)
