"""Set-up of the GPU tests: `fla` is the overlay's, and each test starts anew in poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quasar_kernels.mount import mount
from tests.gpu.calls import poison

mount()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Start from one seed, in memory whose freed blocks hold NaN."""
    torch.manual_seed(0)
    poison()
    yield
    torch.cuda.empty_cache()
