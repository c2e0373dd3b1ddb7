"""The profile of a tree by a real worker: its table and its trace."""

from __future__ import annotations

import json

import pytest

from harness.analysis.profile import main, ncu_command


def test_the_slow_operation_is_found_and_traced(make_tree, tmp_path, capsys):
    slow = (
        "_before = QuasarAttention.forward\n"
        "def forward(self, x, **_):\n"
        "    torch.linalg.svd(torch.ones(300, 300))\n"
        "    return _before(self, x)\n"
        "QuasarAttention.forward = forward\n"
    )
    tree, trace = make_tree(slow), tmp_path / "trace.json"
    arguments = ["--tree", str(tree), "--length", "16", "--device", "cpu", "--trace", str(trace)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    first = out.splitlines()[2]
    assert first.startswith("| aten::_linalg_svd | 1 |")
    assert any(
        event.get("name") == "aten::_linalg_svd"
        for event in json.loads(trace.read_text())["traceEvents"]
    )
    assert ncu_command(tree, 16) in out


def test_a_tree_without_kernels_and_a_bad_length_are_errors(tmp_path, capsys):
    assert main(["--tree", str(tmp_path), "--device", "cpu"]) == 1
    assert "has no fla/ops/quasar/chunk.py. Name the root" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--tree", str(tmp_path), "--length", "0", "--device", "cpu"])
    assert ended.value.code == 2
    assert "--length 0 must be" in capsys.readouterr().err
