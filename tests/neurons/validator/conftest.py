"""Fixtures of the validation's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from neurons.wire.protocol import QueuedSubmission
from tests.neurons.live_api import ALICE, LiveApi
from tests.neurons.validator.judges import Bench, Benches
from tests.neurons.validator.samples import ForkRepository, make_fork


@pytest.fixture
def fork(tmp_path: Path) -> ForkRepository:
    """A fork whose first commit keeps every rule."""
    return make_fork(tmp_path / "fork")


@pytest.fixture
def submission(fork: ForkRepository) -> QueuedSubmission:
    """A submission of that fork, in the validators' queue."""
    return QueuedSubmission(
        id=1,
        miner_hotkey="5Grw",
        fork_url=fork.url,
        commit_hash=fork.git("rev-parse", "HEAD"),
        target_sequence_length=4096,
        tokens_per_sec=1000.0,
        created_at="",
    )


@pytest.fixture
def bench(api: LiveApi, tmp_path: Path) -> Benches:
    """Make a validator with these evaluations, and a miner."""
    api.register(ALICE)
    file = tmp_path / "attempts.sqlite"
    return lambda judge, *further: Bench(api, judge, file, further=further)
