"""The rules that a tree breaks."""

from __future__ import annotations

from pathlib import Path

from harness.worker.checks import find_broken_rules


def test_three_compiled_files_come_before_the_other_broken_rules(tmp_path):
    (tmp_path / "fla").mkdir()
    for name in ("a.so", "b.so", "c.so", "d.so"):
        (tmp_path / "fla" / name).write_bytes(b"\x7fELF")
    problems = find_broken_rules(str(tmp_path)).texts
    compiled = [one for one in problems if one.endswith(": The file is compiled code.")]
    assert [Path(one.split(":")[0]).name for one in compiled] == ["a.so", "b.so", "c.so"]
    assert list(problems[:3]) == compiled
    assert len(problems) > 3  # the fork's own files are missing
