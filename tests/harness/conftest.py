"""Fake trees for the harness: real files, imported by real workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

HONEST = Path(__file__).with_name("honest.py").read_text()
LAYER = "from fla.ops.quasar.chunk import QuasarAttention, chunk_quasar\n"

MakeTree = Callable[..., Path]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run workers with one thread: small tensors gain nothing from more."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Return a function that writes a fork's tree.

    `operator` is code appended to the honest operator and layer, `layer` to the layer's file;
    `package` becomes fla/ops/quasar/__init__.py.
    """

    def make(operator: str = "", layer: str = "", package: str = "", name: str = "tree") -> Path:
        root = tmp_path / name
        for folder in ("fla/layers", "fla/ops/quasar"):
            (root / folder).mkdir(parents=True)
        for part in ("fla", "fla/layers", "fla/ops"):
            (root / part / "__init__.py").touch()
        (root / "fla/ops/quasar/__init__.py").write_text(package)
        (root / "fla/ops/quasar/chunk.py").write_text(f"{HONEST}\n{operator}\n")
        (root / "fla/layers/quasar.py").write_text(f"{LAYER}\n{layer}\n")
        return root

    return make
