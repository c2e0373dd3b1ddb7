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
    if name == "slow":  # for as long as the other is not done
        while not (folder / "fine is done").exists():
            time.sleep(0.01)
    (folder / f"{name} {share}").touch()
    if share == 2:
        raise RuntimeError("a share's own trouble")
    if share:
        return
    yield Wait.TURN
    yield f"{name} saw {len(list(folder.iterdir()))}"
    if name == "dies":
        os._exit(3)
    yield Wait.TOGETHER
    together = name in ("fine", "hangs") and (folder / "hangs 0").exists()
    other = {"fine": "hangs", "hangs": "fine"}[name] if together else name
    (folder / f"{name} again").touch()
    while not (folder / f"{other} again").exists():  # they must be at work at the same time
        time.sleep(0.01)
    yield Wait.TURN
    if name == "hangs":
        time.sleep(3600)
    else:
        yield f"{name} is done"
        (folder / f"{name} is done").touch()
