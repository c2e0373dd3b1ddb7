"""Functions in fresh processes: their results, their deaths and their time limit."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine.processes import ProcessFailed, call, stream
from benchmarks.engine.results import Entry
from tests.processes import HANG, is_alive, wait_for


def counted(n: int) -> Iterator[Entry]:
    for number in range(n):
        yield Entry(table="numbers", figures={"n": number})
    if n > 2:
        os._exit(3)


def stuck(note: str) -> Iterator[int]:
    Path(note).write_text(str(os.getpid()))
    yield 1
    time.sleep(HANG)


def test_results_come_one_by_one_and_a_death_is_named() -> None:
    assert call(os.getpid) != os.getpid()
    assert [one.figures for one in stream(counted, 2)] == [{"n": 0}, {"n": 1}]
    found = stream(counted, 3)
    assert [next(found).figures["n"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ProcessFailed, match="exit status 3"):
        next(found)


def test_a_process_is_killed_at_its_limit_and_when_its_stream_is_closed(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="killed after 1 s"):
        list(stream(time.sleep, HANG, seconds=1))
    assert not multiprocessing.active_children()
    found = stream(stuck, tmp_path / "note")
    assert next(found) == 1
    found.close()  # type: ignore[attr-defined]
    pid = int((tmp_path / "note").read_text())
    wait_for(lambda: not is_alive(pid))
