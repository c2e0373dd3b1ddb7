"""Fixtures of the publishing tests: the fork's remote, and an overlay that tests may change."""

import shutil
from pathlib import Path

import pytest

from neurons.miner.publishing import overlay as overlay_module
from neurons.miner.publishing.fork import Fork
from quasar_kernels.contract import LAYER_FILE, OVERLAY, QUASAR_DIR, TARGET_FILES
from tests.neurons.miner.publishing.forks import MakeFork


@pytest.fixture
def remote(tmp_path: Path, upstream: Path) -> Path:
    return Path(shutil.copytree(upstream, tmp_path / "remote.git"))


@pytest.fixture
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the overlay that the rules require, for speed; a test may change them."""
    copy = tmp_path / "overlay"
    for name in (LAYER_FILE, *(QUASAR_DIR / name for name in TARGET_FILES)):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(OVERLAY / name, copy / name)
    monkeypatch.setattr(overlay_module, "OVERLAY", copy)
    return copy


@pytest.fixture
def make_fork(tmp_path: Path, remote: Path, overlay: Path) -> MakeFork:
    def make(remote_url: str = str(remote), **options: object) -> Fork:
        return Fork(remote_url, None, tmp_path / "state" / "fork", **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def fork(make_fork: MakeFork) -> Fork:
    return make_fork()
