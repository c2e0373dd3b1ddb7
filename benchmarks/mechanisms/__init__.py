"""The compared sequence mixers, one file for each; a new file adds a mixer.

A file has IMPLEMENTATIONS, by their names on the command line. An implementation imports its
library when it is created, so a missing package affects only that implementation.
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
