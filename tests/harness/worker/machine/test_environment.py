"""The description of a machine: the memory that a container may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.worker.machine.environment import usable_memory

HOST = 512 << 30


@pytest.mark.parametrize(
    ("own", "files", "gib"),
    [
        ("0::/\n", {"memory.max": "8589934592\n"}, 8),  # a container
        ("0::/\n", {"memory.max": "max\n"}, 512),
        ("0::/a/b\n", {"a/memory.max": "4294967296\n", "a/b/memory.max": "max\n"}, 4),  # systemd
        ("4:memory:/docker/1\n0::/\n", {"memory/memory.limit_in_bytes": "8589934592\n"}, 8),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 512),
        ("3:cpu:/\n", {}, 512),
        ("", {}, 512),
    ],
)
def test_a_cgroup_limits_the_memory(tmp_path, own, files, gib):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert usable_memory(HOST, tmp_path) == gib << 30


def test_without_cgroups_the_memory_is_the_hosts(tmp_path: Path) -> None:
    assert usable_memory(HOST, tmp_path) == HOST
