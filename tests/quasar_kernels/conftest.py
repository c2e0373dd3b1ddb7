"""Set-up of the kernel tests: the overlay is mounted, and each test starts from one seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quasar_kernels.mount import mount

mount()

from fla.ops.quasar import torch_private  # noqa: E402

from tests.quasar_kernels.cuda.emulated.programs import Programs  # noqa: E402 # imports `fla`

# the tensors are small, so several threads would be ten times slower
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def programs() -> Programs:
    """CUDA programs for the CPU, each built once."""
    return Programs()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let host code launch these programs: there is a stream, and unwritten memory is NaN."""
    monkeypatch.setattr(torch_private, "raw_stream", lambda _: 0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
