"""Fixtures of the layer's tests."""

import pytest

from tests.gpu.layer.layers import make_layer


@pytest.fixture
def layer():
    """A layer of the size that validators time."""
    return make_layer()
