"""The command lines' one manner: what only a person can mend is a line and exit status 78."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from structlog.stdlib import BoundLogger

from neurons import observe
from neurons.configuration.loading import Process, load_settings
from neurons.configuration.settings import Settings
from neurons.errors import EX_CONFIG, ConfigError


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes exit with 78, like every mistake that only a person can mend."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit."""
        self.exit(EX_CONFIG, f"{self.prog}: {message} (--help lists the flags)\n")


def start(
    process: Process,
    flags: Mapping[str, object],
    env_file: Path | None,
    log: BoundLogger,
    run: Callable[[Settings], int],
) -> int:
    """Return what `run` does with the settings, or 78 where a person has to act first."""
    observe.configure()
    try:
        settings = load_settings(flags, env_file, process=process)
        observe.configure(settings.log_level, settings.log_format, settings.secrets())
        for warning in settings.warnings:
            log.warning(str(warning))
        return run(settings)
    except ConfigError as error:
        for problem in error.problems:
            log.error(str(problem))
        return EX_CONFIG
