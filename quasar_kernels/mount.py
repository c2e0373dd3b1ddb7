"""Make `fla.ops.quasar` and `fla.layers.quasar` resolve to the overlay over the installed fla-core.

The packages `blocks` and `delta_rule` mount when they are imported, tests and tools call `mount`. A
measurement does not mount: its process has the fork's tree first on its path. Mounting imports
nothing: a finder locates the overlay's modules when they are first imported.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from quasar_kernels.contract import OVERLAY

_MOUNTED = {
    "fla.ops.quasar": OVERLAY / "fla/ops",
    "fla.layers.quasar": OVERLAY / "fla/layers",
    "fla.layers.quasar_adaptive": OVERLAY / "fla/layers",
}
"""Each mounted module and the folder that holds it."""
_LAYERS = "fla.layers"


class _LayersLoader(Loader):
    """Loads the `fla.layers` of another package, even if a library that it needs is missing.

    The overlay's layer needs none of those libraries, but Python loads `fla.layers` before it.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing.partition(".")[0] == "fla":
                raise

            def refuse(name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                raise ImportError(f"{_LAYERS} needs {missing} for {name}: install {missing}")

            module.__getattr__ = refuse  # type: ignore[method-assign]


class _OverlayFinder(MetaPathFinder):
    """Finds the mounted modules in the overlay, and `fla.layers` even where fla-core has none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _MOUNTED:
            return PathFinder.find_spec(fullname, [str(_MOUNTED[fullname])], target)
        if fullname != _LAYERS:
            return None
        package = PathFinder.find_spec(fullname, path, target)
        if package is None:
            package = ModuleSpec(fullname, None, is_package=True)
            package.submodule_search_locations = [str(_MOUNTED["fla.layers.quasar"])]
        elif package.loader is not None:
            package.loader = _LayersLoader(package.loader)
        return package


def mount(*, adaptive: bool = False) -> None:
    """Put the overlay in front of the installed `fla`; a second call has no effect.

    On a machine without a GPU, fla warns at its import. The warning is suppressed, because the
    overlay computes with torch there.

    Args:
        adaptive: whether `fla.layers.quasar.QuasarAttention` becomes the layer with a step size per
            token, which public Quasar models import by this name.

    Raises:
        RuntimeError: another copy of the mounted modules is already loaded.
    """
    _refuse_other_copies()
    if not any(isinstance(finder, _OverlayFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OverlayFinder())
        warnings.filterwarnings(
            "ignore", "Triton is not supported on current platform", UserWarning, r"fla\."
        )
    if adaptive:
        importlib.import_module("quasar_kernels.blocks.quasar")  # it keeps the first layer's name
        layers = importlib.import_module("fla.layers.quasar")
        model = importlib.import_module("fla.layers.quasar_adaptive")
        layers.QuasarAttention = model.AdaptiveQuasarAttention  # type: ignore[attr-defined]


def _refuse_other_copies() -> None:
    for name, module in list(sys.modules.items()):
        if not any(name == m or name.startswith(f"{m}.") for m in _MOUNTED):
            continue
        origin = getattr(module, "__file__", None)
        if origin is not None and not Path(origin).resolve().is_relative_to(OVERLAY):
            raise RuntimeError(
                f"{name} is already loaded from {origin}; call mount() before anything imports it, "
                f"in a process that has no other copy on sys.path."
            )
