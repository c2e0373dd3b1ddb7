"""Fixtures of the validation's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.neurons.live_api import ALICE, LiveApi
from tests.neurons.validator.judges import Bench, Benches
from tests.neurons.validator.samples import ForkRepository, make_fork


@pytest.fixture
def fork(tmp_path: Path) -> ForkRepository:
    """A fork whose first commit keeps every rule."""
    return make_fork(tmp_path / "fork")


@pytest.fixture
def bench(api: LiveApi, tmp_path: Path) -> Benches:
    """Make a validator with these evaluations, and a miner."""
    api.register(ALICE)
    file = tmp_path / "attempts.sqlite"
    return lambda judge, *further: Bench(api, judge, file, further=further)
