"""The rules that a tree breaks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.measuring.runner import Options, call
from harness.worker.checks import find_broken_rules
from harness.worker.failures import as_worker_error
from tests.processes import HANG


def test_three_compiled_files_come_before_the_other_broken_rules(tmp_path):
    (tmp_path / "fla").mkdir()
    for name in ("a.so", "b.so", "c.so", "d.so"):
        (tmp_path / "fla" / name).write_bytes(b"\x7fELF")
    problems = find_broken_rules(str(tmp_path)).texts
    compiled = [one for one in problems if one.endswith(": The file is compiled code.")]
    assert [Path(one.split(":")[0]).name for one in compiled] == ["a.so", "b.so", "c.so"]
    assert list(problems[:3]) == compiled
    assert len(problems) > 3  # the fork's own files are missing


def test_a_name_that_is_not_utf_8_is_named_in_a_workers_reply(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\n\x1b[2J.so")).touch()
    function = "harness.worker.checks:find_broken_rules"
    reply = call(function, str(tmp_path), options=Options("cpu", HANG), tree=tmp_path)
    first = reply["texts"][0]  # type: ignore[index]
    assert (
        first
        == "\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}[2J.so: The file is compiled code."
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AttributeError("module 'torch.cpu' has no attribute 'device'"), "needs a GPU"),
        (RuntimeError("0 active drivers ([]). There should only be one."), "needs a GPU"),
        (AttributeError("module 'fla' has no attribute 'device'"), None),
    ],
)
def test_a_fork_that_needs_a_gpu_is_told_so(error: Exception, reason: str | None) -> None:
    text = str(as_worker_error(error))
    assert str(error) in text
    assert ("this fork's fla needs a GPU" in text) == bool(reason), text
