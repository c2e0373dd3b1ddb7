"""Fake trees for the harness: real files, imported by real workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.repositories import write_files

HONEST = Path(__file__).with_name("honest.py").read_text()
LAYER = "from fla.ops.quasar.chunk import QuasarAttention, chunk_quasar\n"
PACKAGES = ("fla", "fla/layers", "fla/ops", "fla/ops/quasar")

MakeTree = Callable[..., Path]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run workers with one thread: small tensors gain nothing from more."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Write a fork's packages, its layer, which imports from chunk.py, and `files`."""
    packages = dict.fromkeys((f"{package}/__init__.py" for package in PACKAGES), "")
    write_files(root, {**packages, "fla/layers/quasar.py": LAYER, **files})
    return root


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Return a function that writes a fork's tree.

    `operator` is code appended to the honest operator and layer, `layer` to the layer's file;
    `package` becomes fla/ops/quasar/__init__.py.
    """

    def make(operator: str = "", layer: str = "", package: str = "") -> Path:
        files = {
            "fla/ops/quasar/__init__.py": package,
            "fla/ops/quasar/chunk.py": f"{HONEST}\n{operator}\n",
            "fla/layers/quasar.py": f"{LAYER}\n{layer}\n",
        }
        return write_tree(tmp_path / "tree", files)

    return make
