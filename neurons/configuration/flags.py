"""The command lines' one manner: a mistaken flag is a sentence and exit status 78."""

from __future__ import annotations

import argparse
from typing import NoReturn

from neurons.errors import EX_CONFIG


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes exit with 78, like every mistake that only a person can mend."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit."""
        self.exit(EX_CONFIG, f"{self.prog}: {message} (--help lists the flags)\n")
