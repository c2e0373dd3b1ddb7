"""Types of arguments that several command lines share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Return a whole number from 1 up, for argparse's `type`.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)
