"""Try in a worker the imports that every worker needs: torch, Triton, and the fork's imports."""

from __future__ import annotations

import importlib
import importlib.util
import platform

from harness.hardware.machine import Frozen
from quasar_kernels.contract import fork_imports


class Missing(Frozen):
    """The modules that cannot be imported, each with the error."""

    modules: tuple[str, ...]


def find_missing() -> Missing:
    """Import torch and Triton, and look for the other packages that a fork imports."""
    missing = []
    for name in ("torch", *(["triton"] if platform.system() == "Linux" else [])):
        try:
            importlib.import_module(name)
        except Exception as error:  # a library that cannot be loaded raises OSError, for one
            missing.append(f"{name} ({type(error).__name__}: {error})")
    packages = {module.partition(".")[0] for module in fork_imports()} | {"fla"}
    for name in sorted(packages - {"torch", "triton"}):
        if importlib.util.find_spec(name) is None:
            missing.append(f"{name} (not found)")
    return Missing(modules=tuple(missing))
