"""The commands that explain the others: help, and completion by a shell."""

from __future__ import annotations

from collections.abc import Callable

import click
from click.exceptions import NoSuchCommand
from click.shell_completion import get_completion_class

from neurons.configuration.flags import Given

SCRIPT = "START_MINER.sh"
COMPLETE_VARIABLE = "_START_MINER_SH_COMPLETE"


@click.argument("name", required=False, metavar="[COMMAND]")
@click.pass_context
def explain(context: click.Context, given: Given, name: str | None) -> int:
    """Carry out `help`: the text of one command, or of all."""
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
    """Carry out `completion`: print what a shell evaluates to complete commands and flags."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(context.find_root().command, {}, SCRIPT, COMPLETE_VARIABLE).source())
    return 0


ALL: dict[str, tuple[Callable[..., int], str]] = {
    "help": (explain, "Explain a command."),
    "completion": (
        completion,
        'Print shell completion: eval "$(./START_MINER.sh completion bash)".',
    ),
}
