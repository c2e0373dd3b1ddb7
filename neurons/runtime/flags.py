"""Shared code of the command lines; a configuration error prints one line and exits with 78."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import click
from structlog.stdlib import BoundLogger

from harness.source import tree_commit
from neurons.runtime import observe
from neurons.runtime.errors import EX_CONFIG, ConfigError, not_writable
from neurons.runtime.loading import Process, Sources
from neurons.runtime.settings import Settings
from neurons.runtime.values import PROJECT, expand_home
from quasar_kernels import __version__

Command = TypeVar("Command", bound=Callable[..., Any])

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
FILE = click.Path(path_type=Path)


class Whole(click.IntRange):
    """A whole number within bounds; errors with click's own type would call it an integer range."""

    name = "whole number"


class Folder(click.Path):
    """A path relative to the user's working directory, converted to an absolute path."""

    def __init__(self) -> None:
        super().__init__(readable=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        try:
            return expand_home(path).absolute()
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass
class CommandLineSettings:
    """The settings given on a command line, and the path of the .env with the others."""

    settings: dict[str, object] = field(default_factory=dict)
    env_file: Path | None = None

    @cached_property
    def sources(self) -> Sources:
        """These settings with those of the environment and the .env, read once."""
        return Sources(self.settings, self.env_file)

    def script(self, environ: Mapping[str, str]) -> str:
        """Return the start script and the flags that select this miner, for remedies."""
        words = ["./START_MINER.sh"]
        for flag, variable, value in (
            ("--env-file", "ENV_FILE", self.env_file),
            ("--state-dir", "STATE_DIR", self.settings.get("state_dir")),
        ):
            if value or environ.get(variable):
                words += [flag, str(value or environ[variable])]
        return shlex.join(words)


def keep(context: click.Context, option: click.Parameter, value: Any) -> None:
    """Store an option's value; the option may stand before or after the command's name."""
    given: CommandLineSettings = context.ensure_object(CommandLineSettings)
    if value is None:
        return
    if option.name == "env_file":
        given.env_file = value
    else:
        given.settings[str(option.name)] = value


def setting(*names: str, **options: Any) -> Callable[[Command], Command]:
    """Declare a flag that replaces a setting of the same name."""
    return click.option(*names, callback=keep, expose_value=False, **options)


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return one decorator that declares several options."""

    def decorate(command: Command) -> Command:
        for one in reversed(decorators):
            command = one(command)
        return command

    return decorate


def ignored(name: str, reason: str, **options: Any) -> Callable[[Command], Command]:
    """Declare a flag of the public subnet's programs that only causes a warning."""

    def warn(context: click.Context, _: click.Parameter, value: Any) -> None:
        if value and not context.resilient_parsing:
            click.echo(f"{name} is ignored: {reason}", err=True)

    what = f"Ignored: {reason}."
    return click.option(name, callback=warn, expose_value=False, help=what, **options)


NO_AXON = ignored("--axon.port", "this program serves no axon", metavar="N")

env_file = setting(
    "--env-file", metavar="FILE", type=Folder(), help="Settings file (/dev/null: none)."
)
logging = options(
    setting("--logging.info", "log_level", flag_value="INFO", help="Log as usual."),
    setting("--logging.debug", "log_level", flag_value="DEBUG", help="Log more."),
    setting("--logging.trace", "log_level", flag_value="DEBUG", help="The same."),
)
chain = options(
    setting("--netuid", metavar="N", help="The subnet's number."),
    setting(
        "--subtensor.network", "subtensor_network", metavar="NET", help="The chain, or offline."
    ),
    setting(
        "--subtensor.chain_endpoint", "subtensor_network", metavar="URL", help="The chain's URL."
    ),
)


def version() -> str:
    """Return the version, with the commit if this is a checkout."""
    commit = tree_commit(PROJECT)
    return f"quasar-miner {__version__}" + (f" at {commit[:12]}" if commit else "")


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(version())
        context.exit()


show_version = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and the commit.",
)


def run_command(command: click.Command, name: str, arguments: Sequence[str] | None) -> int:
    """Run a command line and return its exit status, which is 78 after a usage error."""
    try:
        return int(command.main(arguments, prog_name=name, standalone_mode=False) or 0)
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        sys.stderr.write(f"{name}: {message} (--help lists the flags)\n")
        return EX_CONFIG
    except click.Abort:
        return 130


def start(
    process: Process, given: CommandLineSettings, log: BoundLogger, run: Callable[[Settings], int]
) -> int:
    """Return the exit status of `run` with the settings, or 78 if the operator must act first."""
    observe.configure()
    earlier = os.umask(0o077)  # also for SQLite's files; the units of systemd set the same
    try:
        settings = given.sources.settings(process)
        try:
            observe.configure(
                settings.log_level,
                settings.log_format,
                settings.secrets(),
                file=settings.state_dir / "logs" / f"{process}.log",
                ordinary=sys.stdout,
            )
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # temporary
                raise
            raise not_writable(settings.state_dir, error) from None
        for warning in settings.warnings:
            log.warning(str(warning))
        return run(settings)
    except ConfigError as error:
        for problem in error.problems:
            log.error(str(problem))
        return EX_CONFIG
    finally:
        os.umask(earlier)
