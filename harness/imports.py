"""Explain why a tree's import failed, and give the command that installs a missing module."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
import traceback
from pathlib import Path

DISTRIBUTION = "quasar-kernels"


def explain_import(error: ImportError, tree: Path) -> str | None:
    """Return why an import in `tree` failed; None for a module of the tree itself."""
    module = (error.name or "").split(".")[0]
    if not module.isidentifier() or module in sys.stdlib_module_names or (tree / module).exists():
        return None
    frames = traceback.extract_tb(error.__traceback__)
    files = [Path(frame.filename) for frame in frames]
    own = [file.relative_to(tree).as_posix() for file in files if file.is_relative_to(tree)]
    who = own[-1] if own else str(tree)
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        return f"{who} needs {module}, which is not installed"
    return f"{who} needs another version of {module}: {error.msg}"


def install_command(module: str) -> str:
    """Return the command that installs `module`, in the version range that the project needs."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    wanted = (line.partition(";")[0].strip() for line in requirements)
    named = (line for line in wanted if re.split(r"[^\w.-]", line)[0].replace("-", "_") == module)
    return shlex.join([sys.executable, "-m", "pip", "install", next(named, module)])
