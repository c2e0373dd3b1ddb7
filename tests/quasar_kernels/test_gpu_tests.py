"""The GPU tests use only names that exist, which machines without a GPU would not notice."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from quasar_kernels.mount import mount
from tests import gpu

FOLDER = Path(gpu.__path__[0])
FILES = sorted(FOLDER.rglob("test_*.py"))


def missing_names(path: Path) -> list[str]:
    """Return the attributes of modules and classes that a test file uses but that do not exist."""
    parts = path.relative_to(FOLDER).with_suffix("").parts
    module = importlib.import_module(".".join(("tests", "gpu", *parts)))
    return [
        f"line {node.lineno}: {node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if isinstance(owner := getattr(module, node.value.id, None), (ModuleType, type))
        if not hasattr(owner, node.attr)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_names_in_gpu_tests_exist(path):
    mount()
    assert missing_names(path) == []
