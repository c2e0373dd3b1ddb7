"""Fixtures of the mining tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from neurons.mining.context import Context
from tests.neurons.mining.parts import make_context


@pytest.fixture(autouse=True)
def _quick(quick_retries: None) -> None:
    """Never wait between two tries."""


@pytest.fixture
def context(tmp_path: Path, url: str) -> Context:
    """A miner of the stand-in, with everything around it replaced."""
    return make_context(tmp_path / "state", url)
