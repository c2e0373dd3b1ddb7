"""Files that their readers see whole."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file that concurrent readers see whole, old or new; it is not flushed to the disk.

    Raises:
        OSError: the folder or the disk takes no file; an old file stays.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # a killed writer's could have another mode
    try:
        part.touch(mode=mode)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
