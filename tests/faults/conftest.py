"""The fixtures of the miner's tests, since faults are injected into whole cycles."""

from tests.neurons.conftest import fake_api, quick_retries, url
from tests.neurons.miner.conftest import _quick, bench, context, kernels, miner, waits

__all__ = (
    "_quick",
    "bench",
    "context",
    "fake_api",
    "kernels",
    "miner",
    "quick_retries",
    "url",
    "waits",
)
