"""Fixtures of the mining tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import stamina
from parts import make_context
from stand_in import StandIn, serve

from neurons.mining.context import Context


@pytest.fixture(autouse=True)
def quick_retries() -> Iterator[None]:
    """Retry as often as in earnest, without the pauses."""
    with stamina.set_testing(True, attempts=3, cap=True):
        yield


@pytest.fixture
def stand_in() -> StandIn:
    """The validator API's state, to script."""
    return StandIn()


@pytest.fixture
def url(stand_in: StandIn) -> Iterator[str]:
    """The address of the stand-in, a real HTTP server."""
    with serve(stand_in) as address:
        yield address


@pytest.fixture
def context(tmp_path: Path, url: str) -> Context:
    """A miner of the stand-in, with everything around it replaced."""
    return make_context(tmp_path / "state", url)
