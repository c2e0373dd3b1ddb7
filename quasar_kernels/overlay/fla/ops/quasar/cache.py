"""The on-disk cache of compiled kernels: its folder, and atomic writes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from fla.ops.quasar import switches


def cache_folder() -> Path:
    """Return the folder; it may not exist yet."""
    own, users = switches.cache_dirs()
    if not os.path.isabs(users):
        users = os.path.expanduser("~/.cache")  # required by the XDG specification
    return Path(own) if own else Path(users, "quasar")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically and create its folder; readers see the old file or the new one.

    Raises:
        OSError: it could not be written; no temporary file remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
