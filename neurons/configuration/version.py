"""Which version of the program this checkout holds."""

from __future__ import annotations

import re

from harness.source import tree_commit
from neurons.configuration.values import PROJECT


def version() -> str:
    """Return the version of pyproject.toml with the checkout's commit where there is one."""
    found = re.search(r'^version = "(.+)"$', (PROJECT / "pyproject.toml").read_text(), re.M)
    number = found[1] if found else "unknown"
    commit = tree_commit(PROJECT)
    return f"quasar-miner {number}" + (f" at {commit[:12]}" if commit else "")
