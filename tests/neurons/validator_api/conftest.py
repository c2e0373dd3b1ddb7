"""Fixtures of the validator API's tests, which run on SQLite; some run on PostgreSQL too."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import postgresql
from tests.neurons import live_api
from tests.neurons.live_api import ALICE, LiveApi


@pytest.fixture(scope="session")
def server() -> Iterator[postgresql.Server]:
    """A PostgreSQL server for all tests."""
    with postgresql.serve_or_skip() as running:
        yield running


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database: SQLite's unless the test has the mark `on_both`."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{tmp_path / 'api.db'}"
    server: postgresql.Server = request.getfixturevalue("server")
    return server.new_database()


@pytest.fixture
def api(tmp_path: Path, database_url: str) -> Iterator[LiveApi]:
    """A validator API at which only Alice is registered."""
    with live_api.serve(tmp_path, database_url=database_url) as live:
        live.register(ALICE)
        yield live
