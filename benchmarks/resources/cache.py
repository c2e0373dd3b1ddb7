"""Results of compilers, kept in the user's cache folder by a digest of everything they depend on.

Entries that were not used for a month are deleted.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

KEPT_SECONDS = 30 * 24 * 3600


def folder() -> Path:
    """Return the folder of all entries, which need not exist: $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "quasar-miner" / "compiled"


def digest(parts: Iterable[str | bytes]) -> str:
    """Return the SHA-256 of a sequence; two different sequences have different ones."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def entry(name: str, make: Callable[[Path], None]) -> Path:
    """Return the file of an entry; `make` writes it if it is missing.

    Args:
        name: the entry's digest with a suffix for its kind.
        make: writes a file; if several processes do so at once, one file stays.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder() / name
    try:
        os.utime(path)  # it is in use
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as place:
            make(Path(place, name))
            os.replace(Path(place, name), path)
    return path


def delete_old() -> None:
    """Delete the entries that were not used for a month."""
    oldest = time.time() - KEPT_SECONDS
    for path in folder().rglob("*"):
        if path.is_file() and path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)
