"""The measuring harness: runs a validator's timing loop on the miner's own machine."""

from quasar_kernels import __version__

__all__ = ["__version__"]
