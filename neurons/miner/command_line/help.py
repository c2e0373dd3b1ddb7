"""The commands `help`, `version` and `completion`."""

from __future__ import annotations

import shlex

import click
from click.exceptions import NoSuchCommand
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from neurons.runtime.flags import CommandLineSettings, version
from neurons.runtime.values import PROJECT

SCRIPT = "START_MINER.sh"
COMPLETE_VARIABLE = "_START_MINER_SH_COMPLETE"
SHELLS: dict[str, type[ShellComplete]] = {
    "bash": BashComplete,
    "zsh": ZshComplete,
    "fish": FishComplete,
}


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
    # The script calls this checkout's start script by its path. Click's script for bash calls the
    # typed word, which may begin with an unexpanded `~`; those for zsh and fish require the script
    # on PATH.
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
