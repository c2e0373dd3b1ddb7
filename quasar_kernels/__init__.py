"""QuasarAttention: its reference, and the overlay that a fork receives."""

__version__ = "0.2.0"
"""The version of the distribution `quasar-kernels`, which the library and the miner share."""
