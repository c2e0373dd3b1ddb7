"""The measuring harness: the loop that a validator times, run here first."""

from quasar_kernels import __version__

__all__ = ["__version__"]
