"""`python -m neurons.embedded`: a subnet on this machine with a competition and its web pages."""

from __future__ import annotations

from quasar_kernels import interrupts

if __name__ == "__main__":
    interrupts.exit_on_ctrl_c()  # during the imports below

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import click

from harness.terminal import printable
from neurons.embedded.demo import Demo
from neurons.runtime import flags, observe
from neurons.runtime.errors import EX_CONFIG, ConfigError, QuasarError
from neurons.runtime.process import Stopped, stop_on_signals

log = observe.get_logger("embedded")


@click.command(
    help="Runs API, validator and a competition of miners on this machine, and its pages.",
    context_settings=flags.CONTEXT,
)
@click.option(
    "--miners", default=2, type=flags.Whole(0, 6), help="Honest miners; 0 for the pages alone."
)
@click.option("--inference", is_flag=True, help="Inference servers, and logit verification.")
@click.option(
    "--cheat/--no-cheat",
    default=None,
    help="One more miner, with a wrong kernel (the default with other miners).",
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
