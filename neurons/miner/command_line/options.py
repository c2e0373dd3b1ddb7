"""The flags that all commands of the miner share, and the group of its commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from neurons.runtime import flags
from neurons.runtime.flags import CommandLineSettings, Folder, setting

_SHARED: tuple[Callable[[Any], Any], ...] = (
    setting("--netuid", metavar="N", help="The subnet's number."),
    setting("--wallet.name", "wallet_miner_name", metavar="NAME", help="The wallet."),
    setting("--wallet.hotkey", "wallet_hotkey", metavar="NAME", help="The wallet's hotkey."),
    setting(
        "--wallet.path", "wallet_path", metavar="DIR", type=Folder(), help="Folder of wallets."
    ),
    setting(
        "--subtensor.network", "subtensor_network", metavar="NET", help="The chain, or offline."
    ),
    flags.debug,
    setting("--target-seq-len", "target_sequence_length", metavar="N|auto", help="Target length."),
    setting("--agent-iterations", metavar="N", help="Candidates tried after each cycle."),
    setting("--optimization-interval", metavar="SECONDS", help="Pause between cycles."),
    setting("--repo-path", metavar="DIR", type=Folder(), help="A checkout of the fork to use."),
    setting("--state-dir", metavar="DIR", type=Folder(), help="Journal, clone, reports and log."),
    setting("--device", metavar="auto|cuda|cpu", help="Device that runs the kernels."),
    flags.env_file,
)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def shared(command: flags.Command) -> flags.Command:
    """Add the miner's flags to a command; they are also accepted before its name."""
    for flag in reversed(_SHARED):
        command = flag(command)
    return command


class Commands(click.Group):
    """The miner's commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of their definition: daily commands come first."""
        return list(self.commands)


def add_command(
    group: click.Group, name: str, function: Callable[..., int], summary: str
) -> click.Command:
    """Add a function to a group as a command; it receives the miner's flags first."""
    callback = click.make_pass_decorator(CommandLineSettings, ensure=True)(function)
    decorate = group.command(name, help=summary, context_settings=flags.CONTEXT)
    command: click.Command = decorate(shared(callback))
    # `--help` lists the command's own options first
    command.params.sort(key=lambda option: option.callback is flags.keep)
    return command
