"""Fixtures of the validation's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.neurons.validator.samples import ForkRepository, make_fork


@pytest.fixture
def fork(tmp_path: Path) -> ForkRepository:
    """A fork whose first commit keeps every rule."""
    return make_fork(tmp_path / "fork")
