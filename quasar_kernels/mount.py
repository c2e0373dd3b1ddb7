"""Make `fla.ops.quasar` and `fla.layers.quasar` resolve to the overlay over the installed fla-core.

For tests and tools of this project. A measurement does not mount: it runs in a process that has
the fork's own tree first on its path.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from quasar_kernels.contract import OVERLAY

_MOUNTED = ("fla.ops.quasar", "fla.layers.quasar")


def mount() -> None:
    """Put the overlay in front of whatever `fla` is installed; a second call changes nothing.

    Raises:
        RuntimeError: another copy of the mounted modules is already loaded, or would win.
    """
    _refuse_other_copies()
    overlay = OVERLAY / "fla"
    fla = importlib.import_module("fla")
    _search_first(importlib.import_module("fla.ops"), overlay / "ops")
    # fla-core brings no fla.layers: then the overlay's folder becomes that package by itself
    if str(overlay) not in fla.__path__:
        fla.__path__.append(str(overlay))
    importlib.invalidate_caches()
    _search_first(importlib.import_module("fla.layers"), overlay / "layers")
    for name in _MOUNTED:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not _in_overlay(spec.origin):
            raise RuntimeError(
                f"{name} would be loaded from {spec.origin if spec else 'nowhere'}, not from the "
                f"overlay {OVERLAY}; remove the other copy from sys.path."
            )


def _search_first(package: object, folder: Path) -> None:
    path = list(getattr(package, "__path__", ()))
    if str(folder) not in path[:1]:
        package.__path__ = [str(folder), *(p for p in path if p != str(folder))]  # type: ignore[attr-defined]


def _refuse_other_copies() -> None:
    for name, module in list(sys.modules.items()):
        if not any(name == m or name.startswith(f"{m}.") for m in _MOUNTED):
            continue
        origin = getattr(module, "__file__", None)
        if origin is not None and not _in_overlay(origin):
            raise RuntimeError(
                f"{name} is already loaded from {origin}; call mount() before anything imports it, "
                f"in a process that has no other copy on sys.path."
            )


def _in_overlay(origin: str) -> bool:
    return Path(origin).resolve().is_relative_to(OVERLAY)
