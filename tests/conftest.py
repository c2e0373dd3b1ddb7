"""Fixtures that several folders use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_api import LiveApi, serve


@pytest.fixture
def api(tmp_path: Path) -> Iterator[LiveApi]:
    """A validator API with an empty database."""
    with serve(tmp_path) as live:
        yield live
