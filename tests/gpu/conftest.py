"""Set-up of the GPU tests: memory is poisoned before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.calls import poison


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Set the seed and poison the memory."""
    torch.manual_seed(0)
    poison()
    yield
    torch.cuda.empty_cache()
