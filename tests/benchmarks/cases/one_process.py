"""Trainings in this very process: another one would spend its time on importing torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.models import choices


def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainings follow one another in a thread."""
    monkeypatch.setattr(choices, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
