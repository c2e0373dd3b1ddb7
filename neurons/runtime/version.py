"""Which version of the program this checkout holds."""

from __future__ import annotations

from harness.source import tree_commit
from neurons.runtime.values import PROJECT
from quasar_kernels import __version__


def version() -> str:
    """Return the version with the checkout's commit where there is one."""
    commit = tree_commit(PROJECT)
    return f"quasar-miner {__version__}" + (f" at {commit[:12]}" if commit else "")
