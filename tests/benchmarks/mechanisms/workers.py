"""Workers that the tests of turns start in processes of their own; no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.mechanisms.turns import Turn


def worker(name: str, share: int, folder: Path) -> Callable[[Turn], Iterator[object]]:
    """Leave a mark once prepared, and behave as the name says."""
    if name == "unprepared":
        raise RuntimeError("no such module")
    (folder / f"{name} {share}").touch()

    def turn(turn: Turn) -> Iterator[object]:
        if turn.left() <= 0:
            yield f"{name} came too late"
            return
        yield f"{name} saw {len(list(folder.iterdir()))}"
        if name == "dies":
            os._exit(3)
        if name == "hangs":
            time.sleep(60)
        yield f"{name} is done"

    return turn
