"""`python -m neurons.validator_api`: serves the API until SIGTERM or SIGINT."""

from __future__ import annotations

from quasar_kernels import interrupts

if __name__ == "__main__":
    interrupts.exit_on_ctrl_c()  # during the imports below

import signal
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from neurons.runtime import flags, observe
from neurons.runtime.process import stop_on_signals
from neurons.runtime.server import Server, listen
from neurons.runtime.settings import Settings
from neurons.validator_api.api import Api
from neurons.validator_api.app import create_app
from neurons.validator_api.database.storage import DatabaseAway

DATABASE_SECONDS = 5.0
"""Pause between two attempts to connect to the database server, which may start after the API."""

log = observe.get_logger("validator_api")


@click.command(
    help="Serves the validator API until SIGTERM or SIGINT.", context_settings=flags.CONTEXT
)
@flags.setting("--host", metavar="ADDRESS", help="Address to listen on (HOST).")
@flags.setting("--port", metavar="N", help="Port to listen on, 0 for a free one (PORT).")
@click.option("--port-file", metavar="FILE", type=flags.FILE, help="Write the port there.")
@flags.env_file
@flags.show_version
@click.make_pass_decorator(flags.CommandLineSettings, ensure=True)
def command(given: flags.CommandLineSettings, port_file: Path | None) -> int:
    return flags.start("api", given, log, partial(serve, port_file=port_file))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; return the exit status (78: a configuration error)."""
    return flags.run_command(command, "python -m neurons.validator_api", arguments)


def serve(settings: Settings, *, port_file: Path | None) -> int:
    """Serve until a signal; raise a ConfigError for an unusable database or port."""
    if not settings.validator_hotkeys and settings.validator_stake is None:
        log.warning("VALIDATOR_HOTKEYS is empty: nobody may write verdicts")
    server = open_server(settings, port_file)
    if server is None:
        return 0
    # uvicorn raises the signal again when it has stopped; these handlers keep exit status 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listen(settings.host, settings.port, ("HOST", "PORT"))])
    return 0


def open_server(settings: Settings, port_file: Path | None = None) -> Server | None:
    """Wait until the database can be reached and return the server, or None after a signal.

    Raises a ConfigError if the database cannot be opened.
    """
    stop = threading.Event()
    logged = False
    with stop_on_signals(stop):
        while True:
            try:
                return Server(create_app(Api(settings)), _log_ready, port_file)
            except DatabaseAway as error:
                if not logged:
                    log.error(f"{error} Trying again every {DATABASE_SECONDS:.0f} s.")
                logged = True
            if stop.wait(DATABASE_SECONDS):
                return None


def _log_ready(host: str, port: int) -> None:
    log.info("validator API ready", url=f"http://{f'[{host}]' if ':' in host else host}:{port}")


if __name__ == "__main__":
    interrupts.run(main)
