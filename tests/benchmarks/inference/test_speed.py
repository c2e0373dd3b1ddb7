"""The decoding benchmark: a trial on a CPU, and what its page says of a slow server."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.inference import speed
from benchmarks.inference.page import criteria, shown
from benchmarks.inference.results import InferenceRun
from benchmarks.results import load


def test_a_trial_measures_every_way_and_a_slow_server_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "inference.json"
    arguments = ["--device", "cpu", "--size", "tiny", "--new", "4", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["speed", *arguments])
    speed.main()
    run = load(InferenceRun, out)
    assert [row.way for row in run.rows] == ["generate", "server", "generate, static cache"]
    assert all(row.tokens_per_sec > 0 for row in run.rows)
    assert f"{run.rows[1].tokens_per_sec:.1f}" in capsys.readouterr().out

    static = run.rows[2].tokens_per_sec
    slow = run.rows[1].model_copy(update={"tokens_per_sec": static / 2})
    slower = run.model_copy(update={"rows": (run.rows[0], slow, run.rows[2])})
    (promise,) = criteria(slower)
    assert promise.value == pytest.approx(0.5)
    assert not promise.met
    assert "0.5, limit 1" in shown(slower)
