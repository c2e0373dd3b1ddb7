"""A journal on a real file, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from neurons.mining.submissions.journal import Journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite"


@pytest.fixture
def log(path: Path) -> Iterator[Journal]:
    with Journal(path) as journal:
        yield journal
