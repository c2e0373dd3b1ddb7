"""Processes that prepare side by side and work in turns: real ones, that die and hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.mechanisms import turns
from benchmarks.mechanisms.turns import Lost, in_turns
from tests.benchmarks.mechanisms.workers import worker
from tests.processes import HANG


class Clock:
    """Stands in for the module `time`, and can be put forward."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def test_one_that_fails_costs_its_own_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(turns, "time", clock)
    monkeypatch.setattr(turns, "GRACE", 5.0)
    limit = HANG
    shares = [("fine", 3), ("unprepared", 1), ("dies", 1), ("hangs", 1), ("last", 1)]
    found = []
    for message in in_turns(worker, shares, tmp_path, limit):
        found.append(message)
        if message == "fine is done":  # the turn of the one that hangs begins with no time left
            clock.ahead = limit
    # all had prepared, all shares of the first included, before the first turn began
    assert found == [
        Lost("unprepared", "RuntimeError: no such module"),
        "fine saw 6",
        "dies saw 6",
        Lost("dies", "its process ended with exit status 3"),
        "hangs saw 6",
        "last saw 6",
        "fine is done",
        Lost("hangs", "killed: not done within the limit"),
        "last is done",
    ]


def test_the_others_do_not_wait_for_a_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OncePrepared(Clock):
        """Is put forward, past the time for all to prepare, by the other's mark."""

        def monotonic(self) -> float:
            self.ahead = HANG / 4 if (tmp_path / "fine 0").exists() else 0.0
            return super().monotonic()

    monkeypatch.setattr(turns, "time", OncePrepared())
    monkeypatch.setattr(turns, "TOGETHER_SHARE", 0.2)
    found = [*in_turns(worker, [("slow", 1), ("fine", 1)], tmp_path, HANG)]
    assert [message for message in found if str(message).endswith("done")] == [
        "fine is done",
        "slow is done",
    ]
