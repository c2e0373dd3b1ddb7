"""Fixtures of the mining tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path, PurePosixPath

import pytest
import stamina
from forks import UPSTREAM_FILES, MakeFork
from githost import make_repository, run_git
from parts import Key, make_context
from stand_in import StandIn, serve

from neurons.mining.client import ApiClient
from neurons.mining.context import Context
from neurons.mining.publishing import fork as fork_module
from neurons.mining.publishing import overlay as overlay_module
from neurons.mining.publishing.fork import Fork
from quasar_kernels.contract import OVERLAY


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


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("upstream") / "upstream.git", UPSTREAM_FILES)


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
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the overlay that a test may change."""
    copy = tmp_path / "overlay"
    shutil.copytree(OVERLAY, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(overlay_module, "OVERLAY", copy)
    monkeypatch.setattr(
        fork_module,
        "overlay_files",
        lambda scope: sorted(
            PurePosixPath(p.relative_to(copy).as_posix()) for p in copy.rglob("*") if p.is_file()
        ),
    )
    return copy


@pytest.fixture
def client(url: str) -> Iterator[ApiClient]:
    """A client of the stand-in."""
    with closing(ApiClient(url, Key())) as made:
        yield made
