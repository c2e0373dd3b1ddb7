"""Identify a tree's code: missing and compiled files, the digest of the source, the git commit."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path, PurePosixPath

from quasar_kernels.contract import compiled_files

OPERATOR_FILE = Path("fla/ops/quasar/chunk.py")
LAYER_FILE = Path("fla/layers/quasar.py")
GUIDE_FORK = Path("quasar_work/flash-linear-attention")
"""Where the public subnet's guide puts the fork."""


def missing_files(tree: Path) -> list[Path]:
    """Return the required files that `tree` lacks, relative to it."""
    return [name for name in (OPERATOR_FILE, LAYER_FILE) if not (tree / name).is_file()]


def compiled_without_source(tree: Path) -> list[PurePosixPath]:
    """Return the compiled files below `fla` that Python could load without a source.

    `__pycache__` is omitted, because workers compile every source file themselves.
    """
    return [path for path in compiled_files(tree / "fla") if path.parent.name != "__pycache__"]


def source_digest(tree: Path) -> str:
    """Return the SHA-256 over the names and contents of the files below the tree's `fla`.

    It omits `__pycache__` and links to folders.
    """
    digest = hashlib.sha256()
    for folder, names, files in os.walk(tree / "fla"):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for name in sorted(files):
            path = Path(folder, name)
            content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
            relative = os.fsencode(path.relative_to(tree))  # names need not be UTF-8
            digest.update(b"%d %b %d " % (len(relative), relative, len(content)))
            digest.update(content)
    return digest.hexdigest()


def tree_commit(tree: Path) -> str | None:
    """Return the commit of a checkout, `-dirty` if its `fla` has changes.

    Without a checkout, or if git fails, return None.
    """
    if not (tree / ".git").exists():
        return None  # the commit of a surrounding checkout does not describe this folder
    # A checkout's configuration can name programs. These options disable its monitor and hooks, but
    # not its clean filters.
    git = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", str(tree)]
    try:
        head = _output([*git, "rev-parse", "--verify", "HEAD"])
        changed = _output([*git, "status", "--porcelain", "--", "fla"])
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()
