"""Sequence mixers whose costs are compared, one file each: a file here is all that a new one needs.

A file has IMPLEMENTATIONS, by the names that the command line takes. What computes an
implementation is imported when it is made, so that a missing package fails alone.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from benchmarks.engine.mechanism import Implementation


def implementations() -> dict[str, Implementation]:
    """Return every implementation by name, in the order in which they are measured."""
    implementations: dict[str, Implementation] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        implementations |= import_module(module.name).IMPLEMENTATIONS
    return implementations
