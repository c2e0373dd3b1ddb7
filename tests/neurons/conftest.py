"""Fixtures of several packages: two validator APIs, a fake GitHub, and the miner's commands."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import stamina

from neurons.miner import __main__ as command_line
from neurons.miner.command_line import machine_checks
from neurons.wire.client import ApiClient
from tests.neurons import fake_validator_api, githost, live_api
from tests.neurons.fake_validator_api import FakeValidatorApi
from tests.neurons.githost import UPSTREAM_FILES, GitHub
from tests.neurons.live_api import LiveApi
from tests.neurons.miner.miner_command import BARE, Command
from tests.neurons.miner.parts import Key
from tests.repositories import make_repository, run_git


@pytest.fixture
def api(tmp_path: Path) -> Iterator[LiveApi]:
    with live_api.serve(tmp_path) as live:
        yield live


@pytest.fixture
def quick_retries() -> Iterator[None]:
    """Retry as often as in production, without pauses."""
    with stamina.set_testing(True, attempts=3, cap=True):
        yield


@pytest.fixture
def fake_api() -> FakeValidatorApi:
    return FakeValidatorApi()


@pytest.fixture
def url(fake_api: FakeValidatorApi, quick_retries: None) -> Iterator[str]:
    """The address of the fake API, which is a real HTTP server."""
    with fake_validator_api.serve(fake_api) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[ApiClient]:
    with closing(ApiClient(url, Key())) as client:
        yield client


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bare repository of which forks are made."""
    made = make_repository(tmp_path_factory.mktemp("upstream") / "upstream.git", UPSTREAM_FILES)
    run_git(made, "config", "http.receivepack", "true")  # copies accept pushes over HTTP
    return made


@pytest.fixture
def host(upstream: Path, tmp_path: Path) -> Iterator[GitHub]:
    """A fake GitHub with the upstream."""
    (tmp_path / "github").mkdir()
    with githost.serve(tmp_path / "github", upstream) as host:
        yield host


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the miner's command line in this process, in the bare environment and `environ`."""

    def run(*arguments: str, **environ: Any) -> Any:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", {**BARE, **environ})
            status = command_line.main(list(arguments))
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run


@pytest.fixture
def no_software(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no child that imports torch."""
    monkeypatch.setattr(machine_checks, "software", lambda device: iter(()))
