"""What several packages' tests use: a real API and one to script, GitHub and the upstream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import stamina

from neurons.mining.api.client import ApiClient
from tests.neurons import githost, live_api
from tests.neurons import stand_in as stand_in_module
from tests.neurons.githost import UPSTREAM_FILES, GitHub
from tests.neurons.live_api import LiveApi
from tests.neurons.mining.parts import Key
from tests.neurons.stand_in import StandIn
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
def stand_in() -> StandIn:
    """The validator API's state, to script."""
    return StandIn()


@pytest.fixture
def url(stand_in: StandIn, quick_retries: None) -> Iterator[str]:
    """The address of the stand-in, a real HTTP server."""
    with stand_in_module.serve(stand_in) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[ApiClient]:
    """A client of the stand-in."""
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
