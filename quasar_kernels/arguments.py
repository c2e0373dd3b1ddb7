"""The parser of all command lines that use argparse, and types of their arguments."""

from __future__ import annotations

import argparse
import difflib
import os
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse's parser, which also suggests the right spelling of an unknown flag."""

    def error(self, message: str) -> NoReturn:
        known = [flag for action in self._actions for flag in action.option_strings]
        if message.startswith("unrecognized arguments: "):
            words = [word.partition("=")[0] for word in message.split() if word.startswith("-")]
            found = [difflib.get_close_matches(word, known, n=1) for word in words]
            if any(found):
                message += f"; did you mean {' '.join(one[0] for one in found if one)}?"
        super().error(message)


def positive(text: str) -> int:
    """Return a whole number from 1 up, for argparse's `type`.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def output_file(text: str) -> Path:
    """Check that a file can be written, before a long measurement, and make its folder.

    Raises:
        argparse.ArgumentTypeError: it cannot.
    """
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written ({error.strerror})") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written; name another file")
    return path
