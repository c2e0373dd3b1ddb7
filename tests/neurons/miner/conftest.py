"""Fixtures of the miner's tests: a miner with a fake API, fork, benchmark and waits."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from neurons.miner.context import Context
from neurons.miner.journal import Journal
from tests.neurons.miner.parts import FakeBench, FakeFork, Miner, Waits, make_context


@pytest.fixture(autouse=True)
def _quick(quick_retries: None) -> None:
    """Retry without pauses in every test."""


@pytest.fixture
def bench() -> FakeBench:
    return FakeBench()


@pytest.fixture
def kernels(tmp_path: Path) -> FakeFork:
    """The fork that the miner publishes."""
    return FakeFork(tmp_path / "fork")


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def miner(tmp_path: Path, url: str, bench: FakeBench, kernels: FakeFork, waits: Waits) -> Miner:
    """Return a function that starts a miner on one state folder, with options of `make_context`."""
    parts = {"measure": bench, "fork": kernels, "waiter": waits}
    return partial(make_context, tmp_path / "state", url, **parts)


@pytest.fixture
def context(miner: Miner) -> Context:
    """A miner with default settings."""
    return miner()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a journal."""
    return tmp_path / "state" / "journal.sqlite"


@pytest.fixture
def log(path: Path) -> Iterator[Journal]:
    with Journal(path) as journal:
        yield journal
