"""Set-up of the GPU tests: the overlay is mounted, and memory is poisoned before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quasar_kernels.mount import mount
from tests.gpu.calls import poison

mount()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Set the seed and poison the memory."""
    torch.manual_seed(0)
    poison()
    yield
    torch.cuda.empty_cache()
