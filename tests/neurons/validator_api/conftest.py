"""Fixtures of the validator API's tests."""

from __future__ import annotations

import pytest

from tests.neurons.live_api import ALICE, LiveApi


@pytest.fixture
def api(api: LiveApi) -> LiveApi:
    """A validator API at which Alice alone is registered."""
    api.register(ALICE)
    return api
