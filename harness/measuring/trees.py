"""The trees that can be measured: an unchanged fork, or an overlay over fla."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from harness.imports import install_command
from harness.measuring.errors import USABLE_TMPDIR, MeasurementError
from harness.measuring.process import scratch_folder
from harness.source import missing_files
from quasar_kernels.fla_package import PACKAGE, lay_over_fla


@contextmanager
def whole_tree(path: Path, name: str = "") -> Iterator[Path]:
    """Yield the absolute path of a tree that can be imported.

    It is `path` if that is a fork's root. An overlay is copied over a copy of the installed fla.
    `name` replaces the path in errors.

    Raises a MeasurementError if the operator's or the layer's file is missing, or fla is not
    installed.
    """
    if missing := missing_files(path):
        raise MeasurementError(
            f"{name or path} has no {missing[0]}",
            "protocol",
            remedy="Name the root of a fork, or an overlay such as quasar_kernels/overlay.",
        )
    if (path / "fla/__init__.py").exists():
        yield path.resolve()
        return
    with scratch_folder("tree-") as folder:
        try:
            lay_over_fla(path, folder)
        except PackageNotFoundError:
            raise MeasurementError(
                f"{name or path} needs {PACKAGE}, which is not installed",
                "import",
                remedy=f"Run {install_command(PACKAGE.replace('-', '_'))}.",
            ) from None
        except OSError:
            raise MeasurementError(
                f"{PACKAGE} cannot be copied to {folder}",
                "crash",
                remedy=USABLE_TMPDIR,
            ) from None
        yield folder.resolve()
