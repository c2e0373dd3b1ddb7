"""A subnet on this machine, which reaches no other machine and reads no files of the user.

It consists of throwaway hotkeys, a bare git repository as the fork, the validator API on a free
loopback port, and a validator. API and validator are child processes. All files are in one folder.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from neurons.embedded.settings import MINER, VALIDATOR, choose_port, process_environment
from neurons.embedded.upstream import make_upstream
from neurons.runtime.child import Child
from neurons.runtime.errors import EX_CONFIG, ConfigError, Problem, QuasarError
from neurons.runtime.git.clone import make_remote
from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.identity import Identity, create_throwaway
from neurons.runtime.loading import environment
from neurons.runtime.network import client_options
from neurons.runtime.observe import get_logger
from neurons.runtime.process import Stopped
from neurons.runtime.settings import Settings

READY_SECONDS = 300.0
"""A busy machine needs a minute to start the API; if the API ends, the wait ends earlier."""
MAX_STARTS = 3
POSTPONED = ("postponed", "no verdict")
"""The validator's log events for an attempt without a verdict."""
MAX_POSTPONED = 3
"""Attempts at one submission without a verdict after which the run ends."""
LINES = 1000
"""Lines of the validator's log that are kept."""
QUIET_SECONDS = 8.0
"""Longest time without a log line, because an operator watches an embedded run."""

LEFT_OUT = ("event", "level", "logger", "timestamp", "exception")
"""Keys of a line of a child's log that are not shown as details."""

log = get_logger("embedded")


class LogTail:
    """Shows the lines that a process's log of JSON objects gains after this object's creation.

    The file may be missing, and may be truncated. Each shown line begins with `name`.
    """

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        self._position = file.stat().st_size if file.exists() else 0

    def show(self) -> list[dict[str, Any]]:
        """Show the complete lines that were added since the last call; return the JSON objects."""
        data = b""
        if self.file.exists():
            if self.file.stat().st_size < self._position:
                self._position = 0
            with self.file.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        entries = []
        for line in whole.decode(errors="replace").splitlines():
            with suppress(ValueError, TypeError, LookupError, AttributeError):  # not JSON
                entry = json.loads(line)
                details = {key: value for key, value in entry.items() if key not in LEFT_OUT}
                level = logging.getLevelName(entry["level"].upper())
                log.log(level, f"{self.name}: {entry['event']}", **details)
                entries.append(entry)
        return entries


class EmbeddedSubnet:
    """The API and the validator of an embedded run; as a context manager, it runs them.

    Raises a ConfigError if fla-core is missing, a hotkey cannot be read or no port is free.

    Args:
        settings: from `embedded_settings`.
        api_folder: the API's state folder, relative to that of the settings.
        stop: ends the wait for the API. The subnet sets it after a fault, which `check` raises.

    Attributes:
        settings: the argument `settings`, with the addresses of the API and of the fork added.
        identity, validator: the throwaway hotkeys of miner and validator.
        lines: the latest lines of the validator's log, as objects.
    """

    def __init__(self, settings: Settings, stop: threading.Event, api_folder: str = "") -> None:
        if settings.device == "cpu":
            # Threads that busy-wait at barriers make timings on a shared CPU vary tenfold.
            environment().setdefault("OMP_NUM_THREADS", "1")
        folder = settings.state_dir
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.identity: Identity = create_throwaway(settings.wallet_path, MINER)
        self.validator = create_throwaway(settings.wallet_path, VALIDATOR)
        upstream = make_upstream(folder / "upstream.git")
        self._port = choose_port(folder / "port")
        self.settings = settings.model_copy(
            update={
                "validator_api_url": f"http://127.0.0.1:{self._port}",
                "fork_remote": make_remote(upstream, folder / "fork.git"),
                "fork_upstream_url": upstream,
            }
        )
        self._children = [
            Child(
                "validator API",
                ["neurons.validator_api", "--port-file", str(folder / "port")],
                process_environment(
                    self.settings,
                    state_dir=folder / api_folder,
                    host="127.0.0.1",
                    port=self._port,
                    validator_hotkeys=self.validator.hotkey,
                ),
                folder / "api.log",
            ),
            Child(
                "validator",
                ["neurons.validator"],
                process_environment(
                    self.settings, state_dir=folder / "validator", log_format="json"
                ),
                folder / "validator.log",
                due=math.inf,  # started when the API answers
            ),
        ]
        self.lines: deque[dict[str, Any]] = deque(maxlen=LINES)
        self._tail = LogTail("validator", self._children[1].log_file)
        self._postponed: Counter[object] = Counter()
        self._failure: QuasarError | None = None
        self._errors: list[str] = []
        self._stop, self._ended = stop, threading.Event()
        # One thread starts all children, because Linux kills a child when its thread ends.
        self._thread = threading.Thread(target=self._supervise, name="embedded", daemon=True)

    def __enter__(self) -> EmbeddedSubnet:
        self._thread.start()
        try:
            with heartbeat(log, "start of the validator API", first=QUIET_SECONDS):
                self._wait_until_ready()
            self._children[1].due = 0.0
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def supervise(self, child: Child) -> None:
        """Start another process, which ends with the subnet."""
        self._children.append(child)

    def check(self) -> None:
        """Raise the fault that has stopped the run, if any."""
        if self._failure is not None:
            raise self._failure

    def _supervise(self) -> None:
        while not self._ended.wait(0.2):
            for child in self._children:
                child.watch()
            self._look_for_failures()
        for child in self._children:
            child.terminate()
        for child in self._children:
            child.stop()

    def _look_for_failures(self) -> None:
        """Show the validator's log, and stop the run if a verdict has become impossible."""
        for line in self._tail.show():
            self.lines.append(line)
            if line.get("level") in ("error", "critical"):
                self._errors.append(str(line["event"]))
            if line["event"] not in POSTPONED:
                continue
            submission = line.get("submission")
            self._postponed[submission] += 1
            if self._postponed[submission] >= MAX_POSTPONED:
                reason = str(line.get("reason", "")).rstrip(".") or "an unexpected error"
                self._fail(
                    QuasarError(
                        f"The validator of this run postponed submission {submission} "
                        f"{MAX_POSTPONED} times: {reason}. `./START_MINER.sh doctor` checks this "
                        f"machine, {self._tail.file} has every message, and the next start "
                        "continues from here."
                    )
                )
        ended = [child for child in self._children if child.last_status == EX_CONFIG]
        if ended:
            name, file = ended[0].name, ended[0].log_file
            remedy = " ".join([*self._errors[-2:], f"{file} has every message."])
            self._fail(ConfigError(Problem(f"The {name} of this run ended.", remedy)))

    def _fail(self, failure: QuasarError) -> None:
        if self._failure is None:
            self._failure = failure
            self._stop.set()

    def _wait_until_ready(self) -> None:
        api, deadline = self._children[0], time.monotonic() + READY_SECONDS
        url = f"{self.settings.validator_api_url}/health"
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if httpx.get(url, timeout=2.0, **client_options(url)).status_code == 200:
                    return
            if self._stop.wait(0.1):
                self.check()
                raise Stopped("stop requested")
            if api.starts > MAX_STARTS:
                break
        raise QuasarError(f"The embedded validator API does not start; see {api.log_file}.")
