"""Signs of life of work that takes long: none where it is short."""

from __future__ import annotations

import threading

from structlog.testing import capture_logs

from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.observe import get_logger


def test_a_short_piece_of_work_says_nothing_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with capture_logs() as logs, heartbeat(get_logger("t"), "claim"):
        pass
    assert logs == []
    assert threading.active_count() == before
