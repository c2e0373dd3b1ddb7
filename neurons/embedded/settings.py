"""The settings of a subnet on this machine, and of each process in it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from harness.measuring.runner import child_environment
from neurons.runtime.errors import ConfigError
from neurons.runtime.identity import OFFLINE
from neurons.runtime.loading import Sources, environment
from neurons.runtime.machine import resolve_device
from neurons.runtime.settings import Settings

REAL_SUBNET_SETTINGS = ("validator_api_url", "github_username", "fork_remote", "repo_path")
"""Settings that select a real subnet. GITHUB_TOKEN is not one, because other tools set it too."""

IGNORED_VARIABLES = ("GITHUB_TOKEN", "DATABASE_URL", "ALERT_COMMAND", "ALERT_URL", "JOURNAL_COPY")
"""Variables that an embedded run ignores, because they would affect more than its folder."""

PASSED = (
    *("validator_api_url", "fork_upstream_url", "allow_file_forks", "subtensor_network"),
    *("wallet_path", "wallet_validator_name", "wallet_hotkey", "state_dir", "log_level"),
    *("log_format", "device", "target_sequence_length", "claim_runs", "claim_headroom"),
    *("bench_timeout_seconds", "polling_interval", "sandbox", "blocks_until_reveal"),
    *("reveal_window_blocks", "block_time_seconds", "enable_logit_verification"),
    *("inference_servers", "reference_inference_url"),
)
"""Settings that the embedded run passes to its processes."""

BLOCK_SECONDS = 2
WINDOW_BLOCKS = 7 * 24 * 3600 // BLOCK_SECONDS
"""A week, so that a run stopped over a weekend can still reveal its commitment."""
MINER, VALIDATOR = "miner", "validator"
CPU_LENGTH = 2048
CPU_HEADROOM = 0.5


def is_embedded(sources: Sources) -> bool:
    """Return whether there is neither a .env nor a setting of a real subnet.

    Raises a ConfigError if a named .env is missing.
    """
    if sources.path is not None:
        return False
    flags, environ = sources.flags, sources.environ
    return not any(flags.get(x) or environ.get(x.upper()) for x in REAL_SUBNET_SETTINGS)


def embedded_settings(flags: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """Return the settings of an embedded run, without the ports of its children.

    The user's settings apply, except those that would affect other machines.
    """
    wanted = Sources(flags, Path(os.devnull), environ).settings()
    device = resolve_device(wanted.device)
    defaults: dict[str, object] = {
        "target_sequence_length": "auto",
        "blocks_until_reveal": 1,
        "reveal_window_blocks": WINDOW_BLOCKS,
        "block_time_seconds": BLOCK_SECONDS,
        "polling_interval": 2.0,
        "sandbox": "preferred",  # the validator runs only forks from this machine
    }
    if device == "cpu":
        defaults |= {"target_sequence_length": CPU_LENGTH, "claim_headroom": CPU_HEADROOM}
    folder = wanted.state_dir / "embedded"
    forced: dict[str, object] = {
        "device": device,
        "state_dir": folder,
        "wallet_path": folder / "wallets",
        "wallet_miner_name": MINER,
        "wallet_validator_name": VALIDATOR,
        "wallet_hotkey": "default",
        "subtensor_network": OFFLINE,
        "allow_file_forks": True,
    }
    clean = {name: value for name, value in environ.items() if name not in IGNORED_VARIABLES}
    return Sources({**flags, **forced}, Path(os.devnull), clean).settings(defaults=defaults)


def choose_port(file: Path) -> int:
    """Return the last run's port, which a live submission's api_url contains, or any free one.

    Raises a ConfigError if no port is free.
    """
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


def process_environment(settings: Settings, **changes: object) -> dict[str, str]:
    """Return the environment of a process of the subnet, with changed settings."""
    inherited = child_environment(environment(), device=settings.device)
    return {**inherited, "ENV_FILE": os.devnull, **variables(settings, **changes)}


def variables(settings: Settings, **changes: object) -> dict[str, str]:
    """Return the settings that a process of the subnet gets, as variables of the environment."""
    values = {name: getattr(settings, name) for name in PASSED} | changes
    return {
        name.upper(): ",".join(value) if isinstance(value, tuple) else str(value)
        for name, value in values.items()
        if value is not None
    }
