"""The processes, memory and cores of a child and its descendants, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def machine_memory(name: str) -> int:
    """Return a figure of /proc/meminfo in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def descendants(pid: int, most: int) -> Iterator[int]:
    """Yield the descendants of `pid`; beyond `most`, read no further process's children."""
    open_pids, count = [pid], 0
    while open_pids and count <= most:
        for task in _read_children(open_pids.pop()):
            count += 1
            open_pids.append(task)
            yield task


def _read_children(pid: int) -> Iterator[int]:
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:  # it has ended
        return


def affinities(pids: Iterable[int]) -> Iterator[set[int]]:
    """Yield the allowed cores of each thread of these processes."""
    for pid in pids:
        with suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{pid}/task"):
                yield os.sched_getaffinity(int(task))


def process_memory(pid: int) -> int:
    """Return the bytes of a process's memory, without mapped files."""
    try:
        # bytes, because the process may have given itself a name that is not UTF-8
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:
        return 0
    kinds = (b"RssAnon:", b"RssShmem:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))
