"""The code under test: imported from its tree, as a validator imports it."""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from importlib.abc import PathEntryFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from harness.hardware.machine import Frozen, NotNegative
from harness.imports import explain_import
from harness.worker.failures import WorkerError

_ONLY_FROM_TREE = ("fla.ops.quasar", "fla.layers.quasar")


class Imported(Frozen):
    """The time of a tree's import, and the loaded files, relative to the tree."""

    import_seconds: NotNegative
    operator_file: str
    layer_file: str


@dataclass(frozen=True)
class Loaded:
    """The code under test."""

    operator: Any
    layer_class: Any
    imported: Imported


def load_tree(tree: Path) -> Loaded:
    """Import the layer and the operator with `tree` first on the path, as a validator does.

    Raises a WorkerError if they come from elsewhere or need a module that is missing.
    """
    _compile_sources(tree)
    sys.path.insert(0, str(tree))
    started = time.monotonic()
    try:
        layer = importlib.import_module("fla.layers.quasar")
        import_seconds = time.monotonic() - started
        operator = importlib.import_module("fla.ops.quasar.chunk")
    except ImportError as error:
        reason = explain_import(error, tree)
        if reason is None:
            raise
        raise WorkerError(reason, "import") from error
    for name, module in list(sys.modules.items()):
        if any(name == own or name.startswith(f"{own}.") for own in _ONLY_FROM_TREE):
            origin = getattr(module, "__file__", None)
            if origin is None or not Path(origin).resolve().is_relative_to(tree):
                raise WorkerError(f"{name} was loaded from {origin}, not from {tree}", "gate")
    return Loaded(
        operator=operator.chunk_quasar,
        layer_class=layer.QuasarAttention,
        imported=Imported(
            import_seconds=import_seconds,
            operator_file=_relative(operator, tree),
            layer_file=_relative(layer, tree),
        ),
    )


class _FromSource(SourceFileLoader):
    """Compiles a module from its source and ignores byte code."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _compile_sources(tree: Path) -> None:
    """Restrict imports below `tree` to source files: no byte code, no extension modules."""
    finder = FileFinder.path_hook((_FromSource, SOURCE_SUFFIXES))

    def within(path: str) -> PathEntryFinder:
        if not Path(path).resolve().is_relative_to(tree):
            raise ImportError(f"{path} is not in {tree}", path=path)
        return finder(path)

    sys.path_hooks.insert(0, within)
    sys.path_importer_cache.clear()


def _relative(module: ModuleType, tree: Path) -> str:
    return Path(str(module.__file__)).resolve().relative_to(tree).as_posix()
