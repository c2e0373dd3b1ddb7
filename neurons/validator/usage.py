"""The processes, memory and cores of a child and its descendants, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

OWN_SOCKETS = 32
"""Sockets that a worker and the GPU's driver may have; they are almost empty and do not count."""


def machine_memory(name: str) -> int:
    """Return a figure of /proc/meminfo in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def descendants(pid: int, most: int) -> Iterator[int]:
    """Yield the descendants of `pid`; once there are more than `most`, read no more processes."""
    open_pids, count = [pid], 0
    while open_pids and count <= most:
        parent = open_pids.pop()
        with suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text()
                for child in map(int, children.split()):
                    count += 1
                    open_pids.append(child)
                    yield child


def affinities(pids: Iterable[int]) -> Iterator[set[int]]:
    """Yield the allowed cores of each thread of these processes."""
    for pid in pids:
        with suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{pid}/task"):
                yield os.sched_getaffinity(int(task))


def memory_of(pids: Sequence[int], most: int) -> int:
    """Return the bytes of memory of these processes, which have one mount namespace.

    This is the sum of private pages, page tables, the most that sockets can buffer, and the larger
    of two sizes: shared pages, and files in memory. Shared pages may be such files, mapped, and
    must not count twice. After `most` descriptors, those of further processes are not read.
    """
    own = sum(resident(pid, kind) for pid in pids for kind in (b"RssAnon:", b"VmPTE:"))
    shared = sum(resident(pid, b"RssShmem:") for pid in pids)
    mounted = next(filter(None, map(_tmpfs_bytes, pids)), 0)
    files, sockets = _open_bytes(pids, most)
    return own + sockets + max(shared, mounted + files)


@cache
def _socket_bytes() -> int:
    """Return the bytes of a socket's largest send buffer: Linux doubles `wmem_max` for it."""
    return 2 * int(Path("/proc/sys/net/core/wmem_max").read_text())


def resident(pid: int, kind: bytes) -> int:
    """Return the bytes of a process's pages of one kind in /proc/PID/status; 0 if it has ended."""
    try:
        # bytes, because the process may have given itself a name that is not UTF-8
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def _tmpfs_bytes(pid: int) -> int:
    """Return the bytes in all tmpfs mounts of a process's own namespace.

    0 if they cannot be read, or if the process shares this process's mounts.
    """
    used: dict[bytes, int] = {}
    with suppress(OSError):
        if os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt"):
            return 0
        for line in Path(f"/proc/{pid}/mountinfo").read_bytes().splitlines():
            before, _, after = line.partition(b" - ")
            _, _, device, _, place, *_ = before.split()
            if after.startswith(b"tmpfs ") and device not in used:
                path = b"/proc/%d/root" % pid + place.decode("unicode_escape").encode("latin-1")
                with suppress(OSError):  # another mount hides it
                    facts = os.statvfs(path)
                    used[device] = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
    return sum(used.values())


def _open_bytes(pids: Iterable[int], most: int) -> tuple[int, int]:
    """Return the bytes of the memory files (memfd_create) that processes hold open, and of sockets.

    /proc does not show what a Unix socket buffers, so each counts as the most that it can buffer.
    """
    sizes: dict[tuple[int, int], int] = {}
    sockets: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                most -= 1
                with suppress(OSError):
                    path = f"/proc/{pid}/fd/{name}"
                    target = os.readlink(path)
                    if target.startswith("socket:"):
                        sockets.add(target)
                    elif target.startswith("/memfd:"):
                        file = os.stat(path)
                        sizes[file.st_dev, file.st_ino] = 512 * file.st_blocks
        if most < 0:
            break
    return sum(sizes.values()), max(0, len(sockets) - OWN_SOCKETS) * _socket_bytes()
