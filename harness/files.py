"""Atomic writing of files."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace a file's text: readers get the old text or the new one, never a part.

    It is not flushed to the disk (no fsync), so a power failure can lose it. An OSError leaves the
    old file.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # one that a killed writer left may have another mode
    try:
        part.touch(mode=mode)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
