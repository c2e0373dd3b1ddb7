"""`python -m neurons.validator_api`: serves the API until SIGTERM or SIGINT."""

from __future__ import annotations

from quasar_kernels import interrupts

if __name__ == "__main__":
    interrupts.exit_at_once()  # until all below is imported

import gc
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import click

from neurons import observe
from neurons.configuration import flags
from neurons.configuration.settings import Settings
from neurons.identity import Neuron, subnet_neurons
from neurons.processes.listen import listen
from neurons.processes.runtime import stop_on_signals
from neurons.processes.server import Server
from neurons.validator_api.app import create_app
from neurons.validator_api.config import ApiConfig
from neurons.validator_api.database.availability import DatabaseAway

CACHE_SECONDS = 1.0
"""Rounds last days and verdicts take minutes: nobody misses a second."""
SWITCH_SECONDS = 0.0005
DATABASE_SECONDS = 5.0
"""Between two tries to reach a database, which may start after the API."""

log = observe.get_logger("validator_api")


@click.command(
    help="Serves the validator API until SIGTERM or SIGINT.", context_settings=flags.CONTEXT
)
@flags.setting("--host", metavar="ADDRESS", help="Address to listen on (HOST).")
@flags.setting("--port", metavar="N", help="Port to listen on, 0 for a free one (PORT).")
@click.option("--port-file", metavar="FILE", type=flags.FILE, help="Write the port there.")
@flags.env_file
@flags.show_version
@click.make_pass_decorator(flags.Given, ensure=True)
def command(given: flags.Given, port_file: Path | None) -> int:
    """Read the settings and serve."""
    return flags.start("api", given, log, partial(serve, port_file=port_file))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; return the exit status (78: only a person can mend it)."""
    return flags.run_command(command, "python -m neurons.validator_api", arguments)


def serve(settings: Settings, *, port_file: Path | None) -> int:
    """Serve until told to stop.

    Raises:
        ConfigError: the database cannot be opened, or the port is taken.
    """
    if not settings.validator_hotkeys and settings.validator_stake is None:
        log.warning("VALIDATOR_HOTKEYS is empty: nobody may write verdicts")
    server = open_server(settings, port_file)
    if server is None:
        return 0
    _prefer_short_waits()
    # uvicorn raises the signal again once it has stopped; ending on request is a success.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    place = listen(settings.host, settings.port, ("HOST", "PORT"))
    server.run(sockets=[place])
    return 0


def open_server(settings: Settings, port_file: Path | None = None) -> Server | None:
    """Return the server once its database can be reached, None where a signal came before.

    Raises:
        ConfigError: the database cannot be opened.
    """
    stop = threading.Event()
    said = False
    with stop_on_signals(stop):
        while True:
            try:
                return Server(create_app(config_of(settings)), _say_ready, port_file)
            except DatabaseAway as error:
                if not said:
                    log.error(f"{error} Trying again every {DATABASE_SECONDS:.0f} s.")
                said = True
            if stop.wait(DATABASE_SECONDS):
                return None


def _say_ready(host: str, port: int) -> None:
    log.info("validator API ready", url=f"http://{f'[{host}]' if ':' in host else host}:{port}")


def _prefer_short_waits() -> None:
    """Let nobody wait long for the interpreter: neither a thread's answer nor a request.

    A thread that the database has answered may go on after 0.5 ms in place of 5, and what was
    imported, which is never freed, is not looked through for garbage.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()


def config_of(settings: Settings) -> ApiConfig:
    """Return what the settings say about the API; SQLite in the state folder by default."""
    if settings.database_url is not None:
        database_url = settings.database_url.get_secret_value()
    else:
        database_url = f"sqlite:///{settings.state_dir / 'validator_api.db'}"
    return ApiConfig(
        database_url=database_url,
        blocks_until_reveal=settings.blocks_until_reveal,
        reveal_window_blocks=settings.reveal_window_blocks,
        block_time_seconds=settings.block_time_seconds,
        rate_limit=settings.rate_limit,
        allow_file_forks=settings.allow_file_forks,
        trusted_proxies=settings.trusted_proxies,
        validator_hotkeys=frozenset(settings.validator_hotkeys),
        neurons=asks_chain(settings),
        validator_stake=settings.validator_stake,
        cache_seconds=CACHE_SECONDS,
    )


def asks_chain(settings: Settings) -> Callable[[], Mapping[str, Neuron]] | None:
    """Return what asks the chain for the subnet's hotkeys, None where nobody wants to know."""
    if not settings.uids_from_chain and settings.validator_stake is None:
        return None
    return partial(subnet_neurons, settings.netuid, settings.subtensor_network)


if __name__ == "__main__":
    interrupts.run(main)
