"""Fixtures of the validator's tests."""

from pathlib import Path

import pytest

from neurons.runtime.errors import ConfigError
from neurons.validator.sandbox import Sandbox, open_sandbox
from neurons.wire.protocol import QueuedSubmission
from tests.neurons.live_api import ALICE, LiveApi
from tests.neurons.validator.samples import Bench, Benches, ForkRepository, make_fork


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    """The real sandbox; tests that need it are skipped where this machine has none."""
    try:
        return open_sandbox()
    except ConfigError as error:
        pytest.skip(f"NOT PROVEN ON THIS MACHINE: {error}")


@pytest.fixture
def fork(tmp_path: Path) -> ForkRepository:
    """A fork whose first commit keeps every rule."""
    return make_fork(tmp_path / "fork")


@pytest.fixture
def submission(fork: ForkRepository) -> QueuedSubmission:
    """A submission of `fork`, in the validators' queue."""
    claim = {"target_sequence_length": 4096, "tokens_per_sec": 1000.0, "created_at": ""}
    code = {"fork_url": fork.url, "commit_hash": fork.git("rev-parse", "HEAD")}
    return QueuedSubmission.model_validate({"id": 1, "miner_hotkey": "5Grw", **code, **claim})


@pytest.fixture
def bench(api: LiveApi, tmp_path: Path) -> Benches:
    """Make validators with fake evaluations, and register a miner."""
    api.register(ALICE)
    file = tmp_path / "attempts.sqlite"
    return lambda judge, *further: Bench(api, judge, file, further=further)
