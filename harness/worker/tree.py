"""The code under test: imported from its tree, as a validator imports it."""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.imports import explain_import
from harness.report import Kind

_ONLY_FROM_TREE = ("fla.ops.quasar", "fla.layers.quasar")


class WorkerError(Exception):
    """A failure whose kind is known."""

    def __init__(self, reason: str, kind: Kind, remedy: str = "") -> None:
        super().__init__(reason)
        self.kind: Kind = kind
        self.remedy = remedy


@dataclass(frozen=True)
class Loaded:
    """The code under test, and the files that it was loaded from, relative to the tree."""

    operator: Any
    layer_class: Any
    operator_file: str
    layer_file: str
    import_seconds: float


def load_tree(tree: Path) -> Loaded:
    """Import the layer and the operator with `tree` first on the path, as a validator does.

    Raises:
        WorkerError: they were loaded from somewhere else, or this Python lacks what they import.
    """
    sys.path.insert(0, str(tree))
    started = time.monotonic()
    try:
        layer = importlib.import_module("fla.layers.quasar")
        import_seconds = time.monotonic() - started
        operator = importlib.import_module("fla.ops.quasar.chunk")
    except ImportError as error:
        explained = explain_import(error, tree)
        if explained is None:
            raise
        reason, remedy = explained
        raise WorkerError(reason, "import", remedy) from error
    for name, module in list(sys.modules.items()):
        if any(name == own or name.startswith(f"{own}.") for own in _ONLY_FROM_TREE):
            origin = getattr(module, "__file__", None)
            if origin is None or not Path(origin).resolve().is_relative_to(tree):
                raise WorkerError(f"{name} was loaded from {origin}, not from {tree}", "gate")
    return Loaded(
        operator=operator.chunk_quasar,
        layer_class=layer.QuasarAttention,
        operator_file=_relative(operator, tree),
        layer_file=_relative(layer, tree),
        import_seconds=import_seconds,
    )


def _relative(module: ModuleType, tree: Path) -> str:
    return Path(str(module.__file__)).resolve().relative_to(tree).as_posix()
