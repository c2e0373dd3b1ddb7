"""Fixtures of the publishing tests: the fork's remote, and an overlay that tests may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from neurons.miner.publishing import overlay as overlay_module
from neurons.miner.publishing.fork import Fork
from quasar_kernels.contract import OVERLAY
from tests.neurons.miner.publishing.forks import MakeFork
from tests.repositories import run_git


@pytest.fixture
def remote(tmp_path: Path, upstream: Path) -> Path:
    run_git(tmp_path, "clone", "-q", "--bare", str(upstream), "remote.git")
    return tmp_path / "remote.git"


@pytest.fixture
def make_fork(tmp_path: Path, remote: Path) -> MakeFork:
    def make(remote_url: str = str(remote), **options: object) -> Fork:
        return Fork(remote_url, None, tmp_path / "state" / "fork", **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def fork(make_fork: MakeFork) -> Fork:
    return make_fork()


@pytest.fixture
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the overlay that a test may change."""
    copy = tmp_path / "overlay"
    shutil.copytree(OVERLAY, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(overlay_module, "OVERLAY", copy)
    return copy
