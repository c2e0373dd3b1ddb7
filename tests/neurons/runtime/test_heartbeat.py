"""Signs of life: at growing pauses in the log, every second on a terminal, none once it is done."""

from __future__ import annotations

import os
import pty
import threading

import pytest
from structlog.testing import capture_logs

from neurons.runtime import heartbeat as module
from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.observe import get_logger


def test_a_short_piece_of_work_says_nothing_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with capture_logs() as logs, heartbeat(get_logger("t"), "claim"):
        pass
    assert logs == []
    assert threading.active_count() == before


def test_a_terminal_counts_the_seconds_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    master, slave = pty.openpty()
    with (
        os.fdopen(slave, "w") as terminal,
        heartbeat(get_logger("t"), "measure", terminal=terminal),
    ):
        seen = os.read(master, 1000)
        while b"measure, 0 s" not in seen:
            seen += os.read(master, 1000)
    assert os.read(master, 10000).endswith(b"\r\x1b[2K")
    os.close(master)
