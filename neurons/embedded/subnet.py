"""The default without a .env: a whole subnet on this machine that touches nothing outside it.

A throwaway hotkey, a bare git repository as the fork, the validator API on a free loopback port
and a validator, the last two as child processes. Everything lies in one folder of the state.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx

from harness.measuring.runner import child_environment
from neurons.embedded.log_tail import LogTail
from neurons.embedded.upstream import make_upstream
from neurons.runtime.child import Child
from neurons.runtime.errors import EX_CONFIG, ConfigError, Problem, QuasarError
from neurons.runtime.git.clone import make_remote
from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.identity import OFFLINE, Identity, create_throwaway
from neurons.runtime.loading import environment, find_env_file, load_settings
from neurons.runtime.machine import resolve_device
from neurons.runtime.observe import get_logger
from neurons.runtime.process import Stopped
from neurons.runtime.settings import Settings

OUTSIDE = ("validator_api_url", "github_username", "fork_remote", "repo_path")
"""Settings that mean a real subnet. GITHUB_TOKEN is not one: other tools set it as well."""

ELSEWHERE = ("GITHUB_TOKEN", "DATABASE_URL")
"""Variables that do not count here: they lead to what other programs keep."""

VALIDATOR_TAKES = (
    *("validator_api_url", "wallet_validator_name", "wallet_hotkey", "wallet_path", "device"),
    *("polling_interval", "bench_timeout_seconds", "sandbox", "allow_file_forks"),
    *("enable_logit_verification", "inference_servers", "reference_inference_url"),
)
"""Settings of the run that its validator has too."""

API_TAKES = (
    "state_dir",
    "allow_file_forks",
    "blocks_until_reveal",
    "reveal_window_blocks",
    "block_time_seconds",
)
"""Settings of the run that its API has too."""

BLOCK_SECONDS = 2
WINDOW_BLOCKS = 7 * 24 * 3600 // BLOCK_SECONDS
"""A week: a run that was stopped for the weekend goes on with its commitment."""
MINER, VALIDATOR = "miner", "validator"
CPU_LENGTH = 2048
CPU_HEADROOM = 0.5

READY_SECONDS = 60.0
STARTS_ALLOWED = 3
POSTPONED = ("postponed", "no verdict")
"""What the validator logs of an attempt that came to no verdict."""
POSTPONED_ALLOWED = 3
"""Such attempts at one submission before the run ends."""
QUIET_SECONDS = 8.0
"""The longest that an embedded run works without a line: somebody watches it."""

log = get_logger("embedded")


def is_embedded(
    flags: Mapping[str, object], env_file: Path | None, environ: Mapping[str, str]
) -> bool:
    """Tell whether nothing says where a real subnet is: no .env, no flag, no variable.

    Raises:
        ConfigError: a .env is named that does not exist.
    """
    if find_env_file(env_file, environ) is not None:
        return False
    return not any(flags.get(name) or environ.get(name.upper()) for name in OUTSIDE)


def embedded_settings(flags: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """Return the settings of an embedded run, before its children have a port.

    What the user sets still counts, apart from what would lead out of this machine.
    """
    wanted = load_settings(flags, Path(os.devnull), environ)
    device = resolve_device(wanted.device)
    defaults: dict[str, object] = {
        "target_sequence_length": "auto",
        "blocks_until_reveal": 1,
        "reveal_window_blocks": WINDOW_BLOCKS,
        "block_time_seconds": BLOCK_SECONDS,
        "polling_interval": 2.0,
        "sandbox": "preferred",  # it judges this miner's own fork alone
    }
    if device == "cpu":
        defaults |= {
            "target_sequence_length": CPU_LENGTH,
            "claim_headroom": CPU_HEADROOM,
        }
    folder = wanted.state_dir / "embedded"
    forced: dict[str, object] = {
        "device": device,
        "state_dir": folder,
        "wallet_path": folder / "wallets",
        "wallet_miner_name": MINER,
        "wallet_validator_name": VALIDATOR,
        "wallet_hotkey": "default",
        "subtensor_network": OFFLINE,
        "submission_mode": wanted.submission_mode,
        "allow_file_forks": True,
    }
    clean = {name: value for name, value in environ.items() if name not in ELSEWHERE}
    return load_settings({**flags, **forced}, Path(os.devnull), clean, defaults=defaults)


class EmbeddedSubnet:
    """The counterparties of an embedded run, alive between `with` and its end.

    Args:
        settings: from `embedded_settings`.
        stop: when set, the wait for the API ends.

    Raises:
        ConfigError: a part cannot be made here.

    Attributes:
        settings: the same with the addresses of the API and of the fork.
        identity: the miner's throwaway hotkey.
        validator: the validator's.
    """

    def __init__(self, settings: Settings, stop: threading.Event) -> None:
        if settings.device == "cpu":
            # Threads that spin for one another make timings on a shared CPU differ tenfold.
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
                _api_environment(self.settings, self._port, self.validator.hotkey),
                folder / "api.log",
            ),
            Child(
                "validator",
                ["neurons.validator"],
                _validator_environment(self.settings),
                folder / "validator.log",
                due=math.inf,  # once the API answers
            ),
        ]
        self._tail = LogTail("validator", self._children[1].log_file)
        self._postponed: Counter[object] = Counter()
        self._failure: QuasarError | None = None
        self._errors: list[str] = []
        self._asked_to_stop, self._ended = stop, threading.Event()
        # One thread starts every child: the kernel ends them with the thread that started them.
        self._thread = threading.Thread(target=self._supervise, name="embedded", daemon=True)

    def __enter__(self) -> EmbeddedSubnet:
        self._thread.start()
        try:
            self._wait_until_ready()
            self._children[1].due = 0.0
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def check(self) -> None:
        """Return when the validator can judge; it is asked after a stop.

        Raises:
            QuasarError: it postponed a submission too often.
            ConfigError: a part ended with a fault that only a person can correct.
        """
        if self._failure is not None:
            raise self._failure

    def _supervise(self) -> None:
        while not self._ended.wait(0.2):
            for child in self._children:
                child.watch()
            self._look_for_failures()
        for child in self._children:
            child.ask_to_stop()
        for child in self._children:
            child.stop()

    def _look_for_failures(self) -> None:
        """Show what the validator logs, and stop the run where no verdict can come of it."""
        for line in self._tail.show():
            if line.get("level") in ("error", "critical"):
                self._errors.append(str(line["event"]))
            if line["event"] in POSTPONED:
                self._count_postponed(line.get("submission"), str(line.get("reason", "")))
        ended = [child for child in self._children if child.last_status == EX_CONFIG]
        if ended:
            name, file = ended[0].name, ended[0].log_file
            said = " ".join([*self._errors[-2:], f"{file} has every message."])
            self._fail(ConfigError(Problem(f"The {name} of this run ended.", said)))

    def _count_postponed(self, submission: object, reason: str) -> None:
        self._postponed[submission] += 1
        if self._postponed[submission] < POSTPONED_ALLOWED:
            return
        self._fail(
            QuasarError(
                f"The validator of this run postponed submission {submission} "
                f"{POSTPONED_ALLOWED} times: {reason.rstrip('.') or 'an unexpected error'}. "
                f"`./START_MINER.sh doctor` checks this machine, {self._tail.file} has every "
                "message, and the next start goes on from here."
            )
        )

    def _fail(self, failure: QuasarError) -> None:
        if self._failure is None:
            self._failure = failure
            self._asked_to_stop.set()

    def _wait_until_ready(self) -> None:
        with heartbeat(log, "start of the validator API", first=QUIET_SECONDS):
            self._wait_for_health()

    def _wait_for_health(self) -> None:
        api, deadline = self._children[0], time.monotonic() + READY_SECONDS
        url = f"{self.settings.validator_api_url}/health"
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if httpx.get(url, timeout=2.0).status_code == 200:
                    return
            if self._asked_to_stop.wait(0.1):
                self.check()
                raise Stopped("asked to stop")
            if api.starts > STARTS_ALLOWED:
                break
        raise QuasarError(f"The embedded validator API does not start; see {api.log_file}.")


def choose_port(file: Path) -> int:
    """Return the port of the last run, which a live submission names, or a free one."""
    try:
        last = int(file.read_text())
    except (OSError, ValueError):
        last = 0
    for port in (last, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ConfigError("No free port on 127.0.0.1: check this machine's network settings.")


def common_environment(settings: Settings) -> dict[str, str]:
    """Return what every process of an embedded run has in its environment."""
    return {
        **child_environment(environment(), device=settings.device),
        "ENV_FILE": os.devnull,
        **_passed_on(settings, "log_level", "log_format", "subtensor_network"),
    }


def _api_environment(settings: Settings, port: int, validator_hotkey: str) -> dict[str, str]:
    url = settings.database_url
    return {
        **common_environment(settings),
        **_passed_on(settings, *API_TAKES),
        "HOST": "127.0.0.1",
        "PORT": str(port),
        "VALIDATOR_HOTKEYS": validator_hotkey,
        **({"DATABASE_URL": url.get_secret_value()} if url else {}),
    }


def _validator_environment(settings: Settings) -> dict[str, str]:
    return {
        **common_environment(settings),
        **_passed_on(settings, *VALIDATOR_TAKES),
        "LOG_FORMAT": "json",  # its lines are read
        "STATE_DIR": str(settings.state_dir / "validator"),
    }


def _passed_on(settings: Settings, *names: str) -> dict[str, str]:
    values = {name: getattr(settings, name) for name in names}
    return {
        name.upper(): ",".join(value) if isinstance(value, tuple) else str(value)
        for name, value in values.items()
    }
