"""The fixtures of the mining tests: a fault is what comes in the way of a whole miner."""

from tests.neurons.conftest import quick_retries, stand_in, url
from tests.neurons.mining.conftest import _quick, bench, context, kernels, miner, waits

__all__ = (
    "_quick",
    "bench",
    "context",
    "kernels",
    "miner",
    "quick_retries",
    "stand_in",
    "url",
    "waits",
)
