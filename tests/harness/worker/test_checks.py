"""Which sentences the rules of a tree give, compiled code first."""

from __future__ import annotations

from pathlib import Path

from harness.worker.checks import find_broken_rules


def test_compiled_files_are_named_three_of_many_and_what_they_hide_beside_them(tmp_path):
    (tmp_path / "fla").mkdir()
    for name in ("a.so", "b.so", "c.so", "d.so"):
        (tmp_path / "fla" / name).write_bytes(b"\x7fELF")
    sentences = find_broken_rules(str(tmp_path)).texts
    compiled = [one for one in sentences if one.endswith(": The file is compiled code.")]
    assert [Path(one.split(":")[0]).name for one in compiled] == ["a.so", "b.so", "c.so"]
    assert list(sentences[:3]) == compiled
    assert len(sentences) > 3  # the fork's own files are missing
