"""Set-up of the kernel tests: `fla` is the overlay's from here on, and draws are the same again."""

from __future__ import annotations

import pytest
import torch

from quasar_kernels.mount import mount

mount()
# the tensors are small: threads that wait for one another cost ten times what they save
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
