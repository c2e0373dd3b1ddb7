"""A fork as a tree of files: the overlay over a small fla."""

from __future__ import annotations

from pathlib import Path

from quasar_kernels.contract import OVERLAY
from quasar_kernels.fla_package import lay_over_fla
from tests.small_fla import shrink


def make_fork(root: Path) -> Path:
    """Write the files of a fork, without git, to `root` and return it."""
    lay_over_fla(OVERLAY, root)
    shrink(root)
    return root
