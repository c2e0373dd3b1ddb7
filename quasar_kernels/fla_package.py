"""The files of the installed package fla-core, located without importing fla or torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path, PurePosixPath

from quasar_kernels.contract import overlay_files

PACKAGE = "fla-core"
_CLOSED = {
    "layers": "",
    # fla's own __init__.py accepts this error
    "models": 'raise ModuleNotFoundError("this tree has no models", name=__name__)\n',
}


def package_files() -> dict[PurePosixPath, Path]:
    """Return fla-core's files under fla/ by their path in a tree, without other packages' files.

    Raises:
        importlib.metadata.PackageNotFoundError: fla-core is not installed.
    """
    listed = {
        PurePosixPath(file.as_posix()): Path(os.fspath(file.locate()))
        for file in importlib.metadata.distribution(PACKAGE).files or []
        if file.parts[0] == "fla"
    }
    if not listed:  # an editable installation lists no files
        spec = importlib.util.find_spec("fla")  # locates fla without running it
        for folder in (spec and spec.submodule_search_locations) or ():
            root = Path(folder)
            listed |= {
                PurePosixPath("fla", path.relative_to(root).as_posix()): path
                for path in root.rglob("*")
            }
    return {
        name: path
        for name, path in listed.items()
        if "__pycache__" not in name.parts and name.suffix != ".pyc" and path.is_file()
    }


def lay_over_fla(overlay: Path, tree: Path) -> None:
    """Copy fla to `tree`, then copy the files of `overlay` over it.

    Raises:
        importlib.metadata.PackageNotFoundError: fla-core is not installed.
        OSError: the tree cannot be written.
    """
    ours = {name: overlay / name for name in overlay_files(root=overlay)}
    for name, origin in {**package_files(), **ours}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, tree / name)
    close_packages(tree)


def close_packages(tree: Path) -> None:
    """Give `fla.layers` and `fla.models` of a tree an `__init__.py` if they have none.

    fla's `__init__.py` adds every folder `fla` on sys.path to the package. If
    flash-linear-attention is installed, its folder would provide both: other layers than the
    tree's, and models that import layers that the tree lacks.
    """
    for name, text in _CLOSED.items():
        path = tree / "fla" / name / "__init__.py"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
