"""Fixtures of the mining tests: a miner of the stand-in, with everything around it replaced."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from neurons.mining.context import Context
from tests.neurons.mining.parts import Miner, StandInBench, StandInFork, Waits, make_context


@pytest.fixture(autouse=True)
def _quick(quick_retries: None) -> None:
    """Never wait between two tries."""


@pytest.fixture
def bench() -> StandInBench:
    return StandInBench()


@pytest.fixture
def kernels(tmp_path: Path) -> StandInFork:
    """The fork that a miner publishes."""
    return StandInFork(tmp_path / "fork")


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def miner(
    tmp_path: Path, url: str, bench: StandInBench, kernels: StandInFork, waits: Waits
) -> Miner:
    """Begin a life of the miner on one state folder; it takes what `make_context` does."""
    parts = {"measure": bench, "fork": kernels, "waiter": waits}
    return partial(make_context, tmp_path / "state", url, **parts)


@pytest.fixture
def context(miner: Miner) -> Context:
    """A miner with the settings of `make_settings`."""
    return miner()
