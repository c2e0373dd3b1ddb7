"""The commands `help`, `version` and `completion`."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import click
from click.exceptions import NoSuchCommand
from click.shell_completion import get_completion_class

from neurons.runtime.flags import Given, version
from neurons.runtime.values import PROJECT

SCRIPT = "START_MINER.sh"
COMPLETE_VARIABLE = "_START_MINER_SH_COMPLETE"


@click.argument("name", required=False, metavar="[COMMAND]")
@click.pass_context
def explain(context: click.Context, given: Given, name: str | None) -> int:
    """Run `help`: print the help of one command, or of the program."""
    root = context.find_root()
    if name is None:
        click.echo(root.get_help())
        return 0
    commands = getattr(root.command, "commands", {})
    if name not in commands:
        raise NoSuchCommand(name, possibilities=commands, ctx=root)
    click.echo(commands[name].get_help(click.Context(commands[name], root, name)))
    return 0


@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, given: Given, shell: str) -> int:
    """Run `completion`: print the script that lets a shell complete commands and flags."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    source = kind(context.find_root().command, {}, SCRIPT, COMPLETE_VARIABLE).source()
    click.echo(_PREPARE.get(shell, "") + _with_absolute_path(source), nl=False)
    return 0


def _with_absolute_path(source: str) -> str:
    """Return click's completion script with calls of this checkout's start script.

    Click's bash script calls the word that was typed, which may begin with an unexpanded `~`; those
    for zsh and fish call the bare name, which would have to be on PATH.
    """
    call = f" {shlex.quote(str(PROJECT / SCRIPT))})"
    for typed in (" $1)", f" {SCRIPT})"):
        source = source.replace(typed, call)
    return source.replace(f"(( ! $+commands[{SCRIPT}] )) && return 1", "")


_PREPARE = {"zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"}


def show_version(given: Given) -> int:
    click.echo(version())
    return 0


ALL: dict[str, tuple[Callable[..., int], str]] = {
    "help": (explain, "Explain a command."),
    "version": (show_version, "Show the version and the commit."),
    "completion": (completion, "Print what ~/.bashrc needs to complete commands and flags."),
}
