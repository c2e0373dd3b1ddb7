"""The flags that the miner's commands share, their group, and `help`, `version`, `completion`."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import click
from click.exceptions import NoSuchCommand
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from neurons.runtime import flags
from neurons.runtime.flags import CommandLineSettings, Folder, ignored, setting, version
from neurons.runtime.loading import WITHOUT_EFFECT
from neurons.runtime.values import PROJECT

SCRIPT = "START_MINER.sh"
COMPLETE_VARIABLE = "_START_MINER_SH_COMPLETE"
SHELLS: dict[str, type[ShellComplete]] = {
    "bash": BashComplete,
    "zsh": ZshComplete,
    "fish": FishComplete,
}

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
    """Add a function as a command. Its docstring is the help, its first argument the flags."""
    callback = click.make_pass_decorator(CommandLineSettings, ensure=True)(function)
    command = group.command(name, context_settings=flags.CONTEXT)(shared(callback))
    # `--help` lists the command's own options first
    command.params.sort(key=lambda option: option.callback is flags.keep)


@click.argument("name", required=False, metavar="[COMMAND]")
@click.pass_context
def explain(context: click.Context, given: CommandLineSettings, name: str | None) -> int:
    """Explain a command."""
    root = context.find_root()
    if name is None:
        click.echo(root.get_help())
        return 0
    commands = getattr(root.command, "commands", {})
    if name not in commands:
        raise NoSuchCommand(name, possibilities=commands, ctx=root)
    click.echo(commands[name].get_help(click.Context(commands[name], root, name)))
    return 0


@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(context: click.Context, given: CommandLineSettings, shell: str) -> int:
    """Print what ~/.bashrc needs to complete commands and flags."""
    # The printed script calls this checkout's start script by its path. Without this, bash would
    # call the typed word, perhaps with an unexpanded `~`; zsh and fish would search PATH.
    source = SHELLS[shell](context.find_root().command, {}, SCRIPT, COMPLETE_VARIABLE).source()
    for name in ("$1", SCRIPT):
        source = source.replace(f" {name})", f" {shlex.quote(str(PROJECT / SCRIPT))})")
    source = source.replace(f"(( ! $+commands[{SCRIPT}] )) && return 1", "")
    if shell == "zsh":
        source = f"(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}\n{source}"
    click.echo(source, nl=False)
    return 0


def show_version(given: CommandLineSettings) -> int:
    """Show the version and the commit."""
    click.echo(version())
    return 0
