"""Our fork as a tree: the overlay over the installed fla-core."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from quasar_kernels.contract import OVERLAY
from tests.small_fla import make_small


def make_fork(root: Path) -> Path:
    """Write what a fork of ours on the small host holds, without git; return its root."""
    spec = find_spec("fla")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    installed = next(p for p in spec.submodule_search_locations if "site-packages" in p)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed, root / "fla", ignore=ignore)
    shutil.copytree(OVERLAY / "fla", root / "fla", dirs_exist_ok=True, ignore=ignore)
    make_small(root)
    return root
