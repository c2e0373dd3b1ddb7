"""What several packages' tests use: a real API and one to script, GitHub and the upstream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import stamina

from neurons.wire.client import ApiClient
from tests.neurons import fake_validator_api, githost, live_api
from tests.neurons.fake_validator_api import FakeValidatorApi
from tests.neurons.githost import UPSTREAM_FILES, GitHub
from tests.neurons.live_api import LiveApi
from tests.neurons.miner.parts import Key
from tests.repositories import make_repository


@pytest.fixture
def api(tmp_path: Path) -> Iterator[LiveApi]:
    """A validator API with an empty database."""
    with live_api.serve(tmp_path) as live:
        yield live


@pytest.fixture
def quick_retries() -> Iterator[None]:
    """Retry as often as in earnest, without the pauses."""
    with stamina.set_testing(True, attempts=3, cap=True):
        yield


@pytest.fixture
def fake_api() -> FakeValidatorApi:
    """The validator API's state, to script."""
    return FakeValidatorApi()


@pytest.fixture
def url(fake_api: FakeValidatorApi, quick_retries: None) -> Iterator[str]:
    """The address of the fake, a real HTTP server."""
    with fake_validator_api.serve(fake_api) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[ApiClient]:
    """A client of the fake."""
    with closing(ApiClient(url, Key())) as made:
        yield made


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare repository that forks are made of."""
    return make_repository(tmp_path_factory.mktemp("upstream") / "upstream.git", UPSTREAM_FILES)


@pytest.fixture
def host(upstream: Path, tmp_path: Path) -> Iterator[GitHub]:
    """GitHub, which has the upstream."""
    (tmp_path / "github").mkdir()
    with githost.serve(tmp_path / "github", upstream) as host:
        yield host
