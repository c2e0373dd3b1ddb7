"""Workers that the tests of turns start in processes of their own; no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.mechanisms.turns import Wait, Work


def worker(name: str, share: int, folder: Path) -> Work:
    """Leave a mark once prepared, and behave as the name says."""
    if name == "unprepared":
        raise RuntimeError("no such module")
    (folder / f"{name} {share}").touch()
    if share:
        return
    yield Wait.TURN
    yield f"{name} saw {len(list(folder.iterdir()))}"
    if name == "dies":
        os._exit(3)
    yield Wait.TOGETHER
    other = {"fine": "hangs", "hangs": "fine"}.get(name, name)
    (folder / f"{name} again").touch()
    while not (folder / f"{other} again").exists():  # they must be at work at the same time
        time.sleep(0.01)
    left = yield Wait.TURN
    if left.seconds() <= 0:
        yield f"{name} came too late"
    elif name == "hangs":
        time.sleep(60)
    else:
        yield f"{name} is done"
