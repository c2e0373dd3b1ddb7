"""Types of arguments that several command lines share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def positive(text: str) -> int:
    """Return a whole number from 1 up, for argparse's `type`.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def output_file(text: str) -> Path:
    """Return a path that can be written; make its folder.

    A long measurement must not end with a path that cannot. Raises argparse's ArgumentTypeError.
    """
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written ({error.strerror})") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written; name another file")
    return path
