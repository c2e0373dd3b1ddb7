"""The fixtures of the miner's tests, since faults are injected into whole cycles."""

from tests.neurons.conftest import fake_api, quick_retries, url  # noqa: F401
from tests.neurons.miner.conftest import _quick, bench, context, kernels, miner, waits  # noqa: F401
