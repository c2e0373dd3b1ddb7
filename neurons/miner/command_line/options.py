"""The flags that all commands of the miner share, and the group of its commands."""

from __future__ import annotations

from collections.abc import Callable

import click

from neurons.runtime import flags
from neurons.runtime.env_file import WITHOUT_EFFECT
from neurons.runtime.flags import CommandLineSettings, Folder, ignored, setting

shared = flags.options(
    flags.chain,
    setting("--wallet.name", "wallet_miner_name", metavar="NAME", help="The wallet."),
    setting("--wallet.hotkey", "wallet_hotkey", metavar="NAME", help="The wallet's hotkey."),
    setting(
        "--wallet.path", "wallet_path", metavar="DIR", type=Folder(), help="Folder of wallets."
    ),
    flags.logging,
    setting("--target-seq-len", "target_sequence_length", metavar="N|auto", help="Target length."),
    setting("--agent-iterations", metavar="N", help="Candidates tried after each cycle."),
    setting("--optimization-interval", metavar="SECONDS", help="Pause between cycles."),
    setting("--repo-path", metavar="DIR", type=Folder(), help="A checkout of the fork to use."),
    setting("--state-dir", metavar="DIR", type=Folder(), help="Journal, clone, reports and log."),
    setting("--device", metavar="auto|cuda|cpu", help="Device that runs the kernels."),
    flags.env_file,
)
"""Adds the miner's flags to a command; they are also accepted before its name."""

_NO_LANGUAGE_MODEL = WITHOUT_EFFECT["USE_FULL_CONTEXT"]

of_the_public_miner = flags.options(
    flags.NO_AXON,
    ignored("--model-name", WITHOUT_EFFECT["MODEL_NAME"], metavar="NAME"),
    ignored("--byoc-file", WITHOUT_EFFECT["BYOC_FILE_PATH"], metavar="FILE"),
    ignored("--use-full-context", _NO_LANGUAGE_MODEL, is_flag=True),
    ignored("--context-max-files", _NO_LANGUAGE_MODEL, metavar="N"),
    ignored("--context-max-size", _NO_LANGUAGE_MODEL, metavar="N"),
    ignored("--max-length", _NO_LANGUAGE_MODEL, metavar="N"),
    ignored("--max-new-tokens", _NO_LANGUAGE_MODEL, metavar="N"),
)
"""Adds the flags that only the public subnet's miner uses."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Commands(click.Group):
    """The miner's commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of their definition: daily commands come first."""
        return list(self.commands)


def add_command(group: click.Group, name: str, function: Callable[..., int]) -> None:
    """Add a function, which receives the miner's flags first, as a command with its docstring."""
    callback = click.make_pass_decorator(CommandLineSettings, ensure=True)(function)
    command = group.command(name, context_settings=flags.CONTEXT)(shared(callback))
    # `--help` lists the command's own options first
    command.params.sort(key=lambda option: option.callback is flags.keep)
